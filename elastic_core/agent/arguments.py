"""The agent's command line: torchrun's flags, and a few of its own.

Flags are known with dashes and underscores and by torchrun's variables (PET_NNODES
for --nnodes). Mistakes are found before anything starts, all at once, one line each.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import socket
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NoReturn

from elastic_core.agent.metadata import ENDPOINT, ENDPOINT_VARIABLE
from elastic_core.agent.notices import NoticeSource, notice_source
from elastic_core.agent.process import Entrypoint
from elastic_core.agent.settings import AgentSettings, Waits
from elastic_core.errors import RefusedInput
from elastic_core.ids import RunId, check_name
from elastic_core.model.job_file import nearest
from elastic_core.model.sizes import ALL_SIZES, AllowedSizes, parse_sizes
from elastic_core.store.endpoint import (
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    Access,
    Credentials,
    TlsFiles,
    parse_endpoints,
)

BACKENDS: Final = ("etcd3", "etcd", "etcd-v2")

_WAITS: Final[Mapping[str, str]] = {
    "lease_ttl": "lease_ttl",
    "last_call_timeout": "last_call",
    "join_timeout": "join",
    "timeout": "join",
    "probe_timeout": "probe",
    "suspect_timeout": "suspect",
    "stop_grace": "stop_grace",
    "stop_timeout": "stop",
    "flow_timeout": "flow",
    "hang_timeout": "hang",
    "partial_exit_timeout": "partial_exit",
}
"""Keys of --rdzv-conf, and the waits they set."""

_TORCH_CONF: Final = frozenset(
    {"is_host", "read_timeout", "store_type", "keep_alive_interval", "keep_alive_max_attempts", "rank",
     "heartbeat_timeout", "close_timeout", "use_libuv", "protocol", "local_addr"}
)  # fmt: skip
"""Keys that torch's own back ends know and that mean nothing here."""

_MEANINGLESS: Final = (
    "--monitor-interval", "--event-log-handler", "--numa-binding", "--signals-to-handle", "--logs-specs",
    "--local-ranks-filter", "--node-rank", "--master-addr", "--master-port", "--redirects", "--tee",
    "--run-path", "--virtual-local-rank",
)  # fmt: skip
_SHORT: Final = {"--redirects": ("-r",), "--tee": ("-t",)}

_EPILOG: Final = """\
examples:
  # two to four nodes with one worker each; the same line on every node
  elastic-agent --nnodes=2:4 --rdzv-endpoint=10.0.0.5:2379 --rdzv-id=digits-1 train.py --epochs 3

  # all of it on this machine, with an etcd of its own
  elastic-agent --standalone --nproc-per-node=2 train.py

  # a trainer of the elastic API: its workers survive changes of the nodes
  elastic-agent --nnodes=1:4 --rdzv-endpoint=10.0.0.5 --worker-api=elastic \\
      --job=runs/digits-1/job.json --run-dir=runs/digits-1 -m elastic_core.trainer run

  # any program, no Python
  elastic-agent --standalone --no-python bash -c 'echo rank $RANK of $WORLD_SIZE'

keys of --rdzv-conf, in seconds:
  lease_ttl (3)   last_call_timeout (5)   join_timeout (600)   probe_timeout (0.3)
  suspect_timeout (0.7)   stop_grace (30)   stop_timeout (60)   hang_timeout (0: by the steps so far)
  partial_exit_timeout (3600)   flow_timeout (0: never; else stop when no flow drove the run for so long)

signals:
  SIGTERM, SIGINT, a spot notice: this node leaves; the others go on, or the state is saved. Again: at once.

exit codes:
  0    the run succeeded              69   fewer nodes than the minimum came in time
  2    bad input, nothing was started 70   failures followed each other without a new step
  72   this node failed a pre-flight check
  75   stopped on purpose, resumable  128+n  a worker died by signal n
  any other: the script's own, of the first worker that failed
"""


class _Parser(argparse.ArgumentParser):
    """Reports its own refusals as ours: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        raise RefusedInput([f"{message}; see --help"])


def parse_arguments(
    argv: Sequence[str], environment: Mapping[str, str] = os.environ, *, device_count: int | None = None
) -> AgentSettings:
    """Return what the command line asks for.

    Args:
        argv: Arguments without the program's name.
        environment: For PET_* variables and ELASTIC_ATTEMPT.
        device_count: GPUs of this machine; None: count them.

    Raises:
        RefusedInput: Every mistake, one line each: field, value, remedy.
    """
    options = _make_parser(environment).parse_args(argv)
    return _Reader(options, environment, count_gpus() if device_count is None else device_count).read()


def count_gpus() -> int:
    """Return the number of NVIDIA devices that this process may use; torch is not asked, it is slow."""
    return sum(1 for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name))


def _make_parser(environment: Mapping[str, str]) -> _Parser:
    parser = _Parser(
        prog="elastic-agent",
        description="Run the training workers of one node of an elastic run.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = _Adder(parser, environment)
    add("--nnodes", "1", "nodes of the run: N, or MIN:MAX", metavar="MIN:MAX")
    add("--node-sizes", "", "train on these numbers of nodes only: N,N or, for multiples, xN", metavar="N,N")
    add("--nproc-per-node", "1", "workers on this node: a number, auto, gpu or cpu", metavar="N")
    add("--rdzv-backend", "etcd3", "etcd3 (etcd and etcd-v2 are taken for it)", metavar="NAME")
    add("--rdzv-endpoint", "", "host:port of etcd, several with commas; port 2379 if none", metavar="HOST")
    add("--rdzv-id", "", "id of the run, the same on all of its nodes", metavar="ID")
    add("--rdzv-conf", "", "waits: key=value,key=value", metavar="CONF")
    add("--etcd-ca", "", "PEM file of the authority of etcd's certificate: turns TLS on", metavar="FILE")
    add("--etcd-cert", "", "PEM file of this client's certificate, with --etcd-key", metavar="FILE")
    add("--etcd-key", "", "PEM file of the certificate's key", metavar="FILE")
    user = environment.get(USER_VARIABLE, "")
    add("--etcd-user", user, f"user of etcd; its password comes from {PASSWORD_VARIABLE}", metavar="NAME")
    add("--etcd-password-file", "", "or from the first line of this file", metavar="FILE")
    add("--max-restarts", "0", "failures of workers that are mended, job-wide; losses cost none", metavar="N")
    add("--changes-per-hour", "0", "end the run when nodes come or go more often; 0: never", metavar="N")
    add("--start-method", "fork", "fork (warm, fast) or spawn", metavar="METHOD")
    add("--role", "default", "value of ROLE_NAME", metavar="NAME")
    add("--log-dir", "", "write each worker's output there, in a directory of this node", metavar="DIR")
    add("--shutdown-timeout", "", "the same as stop_grace of --rdzv-conf", metavar="SECONDS")
    add("--local-addr", "", "torchrun's name of --advertise", metavar="ADDRESS")
    add("--worker-api", "torchrun", "torchrun, or elastic: workers outlive generations", metavar="API")
    add("--name", "", "name of this instance: lower-case letters, digits, dashes", metavar="NAME")
    add(
        "--advertise",
        "",
        "address at which other nodes reach this one; else found by route",
        metavar="ADDRESS",
    )
    add("--notices", "none", "imds: leave when EC2 announces that it takes this machine", metavar="SOURCE")
    imds = environment.get(ENDPOINT_VARIABLE, ENDPOINT)
    add("--notices-endpoint", imds, "address of the metadata service", metavar="URL")
    add("--leave-before", "0", "so many seconds before the announced end; 0: at once", metavar="SECONDS")
    add("--preflight", "on", "on: see whether this node is fit before it takes part; or off", metavar="WORD")
    add("--run-dir", "", "directory of the run, shared by all nodes", metavar="DIR")
    add("--job", "", "JSON of the job, for workers of the elastic API", metavar="FILE")
    parser.add_argument(
        "--preload", action="append", default=[], metavar="MODULE", help="import before workers are forked"
    )
    parser.add_argument("--standalone", action="store_true", help="one node, with an etcd of its own")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module: python -m")
    add.flag("--no-python", "the program is no Python script")
    add.ignored(_MEANINGLESS)
    parser.add_argument("program", help="script, module or program")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="its arguments, byte for byte")
    return parser


class _Adder:
    """Adds options that have two spellings and a variable."""

    def __init__(self, parser: argparse.ArgumentParser, environment: Mapping[str, str]) -> None:
        self._parser = parser
        self._environment = environment

    def __call__(
        self,
        flag: str,
        default: str | None,
        text: str,
        *,
        metavar: str | None = None,
        short: Sequence[str] = (),
    ) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        value = self._environment.get(f"PET_{name.upper()}", default)
        self._parser.add_argument(
            *short, *_spellings(flag), dest=name, default=value, metavar=metavar, help=text
        )

    def ignored(self, flags: Sequence[str]) -> None:
        """Add options that are accepted, and not shown."""
        for flag in flags:
            self(flag, None, argparse.SUPPRESS, short=_SHORT.get(flag, ()))

    def flag(self, flag: str, text: str) -> None:
        """Add an option without a value."""
        self._parser.add_argument(*_spellings(flag), action="store_true", help=text)


def _spellings(flag: str) -> tuple[str, ...]:
    underscored = "--" + flag.removeprefix("--").replace("-", "_")
    return (flag,) if underscored == flag else (flag, underscored)


class _Reader:
    """Turns options into settings and collects every mistake."""

    def __init__(self, options: argparse.Namespace, environment: Mapping[str, str], gpus: int) -> None:
        self._options = options
        self._environment = environment
        self._gpus = gpus
        self._problems: list[str] = []
        self._notices: list[str] = []

    def read(self) -> AgentSettings:
        """Return the settings.

        Raises:
            RefusedInput: All mistakes.
        """
        options = self._options
        minimum, maximum = self._nodes()
        endpoint, tls, credentials = self._store()
        settings = AgentSettings(
            min_nodes=minimum,
            max_nodes=maximum,
            sizes=self._sizes(minimum, maximum),
            slots=self._slots(),
            run=self._run(),
            name=self._name(),
            entrypoint=self._entrypoint(),
            args=tuple(options.args),
            api=self._choice("--worker-api", ("torchrun", "elastic")),
            endpoint=endpoint,
            tls=tls,
            credentials=credentials,
            standalone=options.standalone,
            waits=self._waits(),
            max_restarts=self._number("--max-restarts"),
            changes_per_hour=self._number("--changes-per-hour"),
            start_method=self._choice("--start-method", ("fork", "spawn", "forkserver")),
            preload=tuple(options.preload),
            preflight=self._choice("--preflight", ("on", "off")) == "on",
            role=options.role,
            log_dir=None,
            run_dir=str(Path(options.run_dir).absolute()) if options.run_dir else "",
            job=self._job(),
            attempt=self._attempt(),
            advertise=options.advertise or options.local_addr,
            notice_source=self._notice_source(),
        )
        self._check_backend()
        self._note_meaningless()
        if self._problems:
            raise RefusedInput(self._problems)
        return replace(settings, log_dir=self._log_dir(settings.name), notices=tuple(self._notices))

    # ---- one option each ---------------------------------------------------------------------

    def _refuse(self, flag: str, value: object, remedy: str) -> None:
        self._problems.append(f"{flag} {str(value)!r}: {remedy}")

    def _value(self, flag: str) -> str:
        return str(getattr(self._options, flag.removeprefix("--").replace("-", "_")))

    def _number(self, flag: str) -> int:
        text = self._value(flag)
        if not (text.isascii() and text.isdigit()):
            self._refuse(flag, text, "must be a whole number, 0 or more")
            return 0
        return int(text)

    def _choice(self, flag: str, allowed: tuple[str, ...]) -> Any:
        value = self._value(flag)
        if value not in allowed:
            self._refuse(flag, value, f"must be {' or '.join(allowed)}{nearest(value, allowed)}")
            return allowed[0]
        return "fork" if value == "forkserver" else value

    def _nodes(self) -> tuple[int, int]:
        text = self._value("--nnodes")
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
        if not match:
            self._refuse("--nnodes", text, "write a number, or MIN:MAX")
            return 1, 1
        minimum = int(match[1])
        maximum = int(match[2] or match[1])
        if minimum < 1:
            self._refuse("--nnodes", text, "at least 1 node is needed")
        elif minimum > maximum:
            self._refuse("--nnodes", text, f"min is {minimum} and max is {maximum}: raise max or lower min")
        elif self._options.standalone and maximum > 1:
            self._refuse("--nnodes", text, "--standalone is one node; give --rdzv-endpoint for more")
        return minimum, maximum

    def _sizes(self, minimum: int, maximum: int) -> AllowedSizes:
        text = self._value("--node-sizes")
        sizes = parse_sizes(text)
        if sizes is None:
            self._refuse("--node-sizes", text, "write numbers with commas (2,4,8), or xN for multiples of N")
            return ALL_SIZES
        if not sizes.are_all and not minimum <= sizes.largest_within(maximum):
            self._refuse("--node-sizes", text, f"none lies between min ({minimum}) and max ({maximum})")
        return sizes

    def _slots(self) -> int:
        text = self._value("--nproc-per-node")
        if text == "gpu" and not self._gpus:
            self._refuse("--nproc-per-node", text, "this node has no GPU; use cpu, auto or a number")
        elif text in ("gpu", "auto") and self._gpus:
            return self._gpus
        elif text in ("cpu", "auto"):
            return os.cpu_count() or 1
        elif not (text.isascii() and text.isdigit() and 1 <= int(text) <= 1024):
            self._refuse("--nproc-per-node", text, "must be a number from 1 to 1024, auto, gpu or cpu")
        else:
            return int(text)
        return 1

    def _run(self) -> RunId:
        value = self._value("--rdzv-id")
        if not value:
            if not self._options.standalone:
                self._refuse("--rdzv-id", value, "give the run's id, the same on all of its nodes")
                return RunId("run")
            return RunId(f"standalone-{_random_name()}")
        # torch takes any text; ours ends in keys and file names, so its usual forms are put into ours
        return RunId(self._checked("--rdzv-id", "run", f"run-{value}" if value.isdigit() else value))

    def _name(self) -> str:
        value = self._value("--name")
        if value:
            return self._checked("--name", "node", value)
        host = re.sub(r"[^a-z0-9-]+", "-", socket.gethostname().split(".")[0].lower()).strip("-")
        host = host if host[:1].isalpha() else f"node-{host}"
        return f"{host[:50].rstrip('-')}-{_random_name()}"

    def _checked(self, flag: str, kind: str, value: str) -> str:
        try:
            return check_name(kind, value)
        except ValueError as error:
            self._problems.append(f"{flag}: {error}")
            return "invalid"

    def _entrypoint(self) -> Entrypoint:
        options = self._options
        if options.module and options.no_python:
            self._problems.append("--module and --no-python: a program is one or the other, drop one")
        if options.module:
            return Entrypoint("module", options.program)
        if options.no_python:
            return Entrypoint("command", options.program)
        path = Path(options.program)
        try:
            path.open("rb").close()
        except PermissionError:
            self._refuse("script", path, "it cannot be read; check its permissions and its directories'")
        except OSError:
            self._refuse("script", path, f"there is no such file in {Path.cwd()}; give its path")
        return Entrypoint("script", options.program)

    def _store(self) -> tuple[str, TlsFiles | None, Credentials | None]:
        """Return how the store is reached: its endpoints, how to speak to it, and who we are."""
        if self._options.standalone:
            return "", None, None
        tls, credentials = self._tls(), self._credentials()
        value = self._value("--rdzv-endpoint")
        if not value:
            self._refuse("--rdzv-endpoint", value, "give host:port of etcd, or --standalone for one node")
            return "", None, None
        try:
            endpoints = parse_endpoints(value)
            if not self._value("--etcd-ca"):
                Access(endpoints, credentials=credentials)  # refuses a password in the clear
        except RefusedInput as error:
            self._problems += [f"--rdzv-endpoint: {problem}" for problem in error.problems]
            return "", None, None
        return ",".join(map(str, endpoints)), tls, credentials

    def _tls(self) -> TlsFiles | None:
        ca, cert, key = (self._value(flag) for flag in ("--etcd-ca", "--etcd-cert", "--etcd-key"))
        if not ca:
            if cert or key:
                self._refuse("--etcd-ca", ca, "a certificate needs TLS; give the file of etcd's authority")
            return None
        try:
            return TlsFiles(
                ca=Path(ca).absolute(),
                cert=Path(cert).absolute() if cert else None,
                key=Path(key).absolute() if key else None,
            )
        except RefusedInput as error:
            self._problems += [f"--etcd-ca, --etcd-cert, --etcd-key: {problem}" for problem in error.problems]
            return None

    def _credentials(self) -> Credentials | None:
        user, file = self._value("--etcd-user"), self._value("--etcd-password-file")
        password = self._environment.get(PASSWORD_VARIABLE, "")
        if file:
            try:
                password = next(iter(Path(file).read_text().splitlines()), "")
            except (OSError, UnicodeDecodeError):
                self._refuse("--etcd-password-file", file, "it cannot be read; check path and permissions")
                return None
        if user and not password:
            self._refuse("--etcd-user", user, f"has no password; set {PASSWORD_VARIABLE}")
        if file and not user:
            self._refuse("--etcd-user", user, "a password is given; give the name of its user too")
        return Credentials(user, password) if user and password else None

    def _notice_source(self) -> NoticeSource | None:
        try:
            return notice_source(*map(self._value, ("--notices", "--notices-endpoint", "--leave-before")))
        except RefusedInput as error:
            self._problems += error.problems
            return None

    def _job(self) -> str:
        value = self._value("--job")
        if not value:
            return ""
        if not os.access(value, os.R_OK):
            self._refuse("--job", value, "it cannot be read; give the path of the job's JSON")
        return str(Path(value).absolute())

    def _attempt(self) -> int:
        text = self._environment.get("ELASTIC_ATTEMPT", "1")
        if not (text.isascii() and text.isdigit()):
            self._refuse("ELASTIC_ATTEMPT", text, "must be a whole number: which launch of the run this is")
            return 1
        return int(text)

    def _log_dir(self, name: str) -> Path | None:
        value = self._value("--log-dir")
        if value:
            return Path(value).absolute() / name
        run_dir = self._value("--run-dir")
        return Path(run_dir).absolute() / "logs" / name if run_dir else None

    def _waits(self) -> Waits:
        found: dict[str, float] = {}
        for key, text in self._conf():
            if key in _TORCH_CONF:
                self._notices.append(f"--rdzv-conf {key}: has no meaning with etcd v3, ignored")
            elif key not in _WAITS:
                self._notices.append(f"--rdzv-conf {key}: unknown key, ignored{nearest(key, _WAITS)}")
            else:
                found |= self._seconds(f"--rdzv-conf {key}", _WAITS[key], text)
        if grace := self._value("--shutdown-timeout"):
            found |= self._seconds("--shutdown-timeout", "stop_grace", grace)
        return Waits(**found)

    def _conf(self) -> Iterator[tuple[str, str]]:
        for part in self._value("--rdzv-conf").split(","):
            key, equals, text = part.strip().partition("=")
            if part.strip() and not equals:
                self._refuse("--rdzv-conf", part, "write key=value,key=value")
            elif key:
                yield key.strip(), text.strip()

    def _seconds(self, flag: str, name: str, text: str) -> dict[str, float]:
        lowest = {"lease_ttl": 2.0, "probe": 0.01, "suspect": 0.2, "join": 0.1}.get(name, 0.0)
        try:
            seconds = float(text)
        except ValueError:
            seconds = -1.0
        if not lowest <= seconds <= 1e6:
            self._refuse(flag, text, f"must be seconds, {lowest:g} or more")
            return {}
        return {name: seconds}

    def _check_backend(self) -> None:
        value = self._value("--rdzv-backend")
        if value in ("etcd", "etcd-v2"):
            self._notices.append(f"--rdzv-backend {value}: using etcd v3")
        elif value not in BACKENDS and not self._options.standalone:
            self._refuse("--rdzv-backend", value, f"only etcd3 is there{nearest(value, BACKENDS[:1])}")

    def _note_meaningless(self) -> None:
        for flag in _MEANINGLESS:
            if getattr(self._options, flag.removeprefix("--").replace("-", "_")) is not None:
                self._notices.append(f"{flag}: has no meaning here, ignored")


def _random_name() -> str:
    return "".join(random.choices(string.ascii_lowercase + string.digits, k=6))
