"""Command lines of torchrun and its relatives, understood."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Final, Literal, NoReturn

from elastic_core.errors import RefusedInput
from elastic_core.model.job_file import nearest

LAUNCHERS: Final = ("torchrun", "dlrover-run", "elastic-agent")
MODULES: Final = (
    "torch.distributed.run",
    "torch.distributed.launch",
    "torchelastic.distributed.launch",
    "elastic_core.agent",
)

WAITS: Final[Mapping[str, str]] = {
    "lease_ttl": "lease_ttl",
    "last_call_timeout": "last_call",
    "lastcall_timeout": "last_call",
    "join_timeout": "join",
    "timeout": "join",
    "pend_timeout": "join",
    "probe_timeout": "probe",
    "suspect_timeout": "suspect",
    "stop_grace": "stop_grace",
}
"""Keys of --rdzv-conf, and the job's timeouts that they become."""

_VALUED: Final = {
    "nnodes": "1", "nproc-per-node": "1", "rdzv-backend": "", "rdzv-endpoint": "", "rdzv-id": "",
    "rdzv-conf": "", "max-restarts": "", "start-method": "", "log-dir": "", "shutdown-timeout": "",
}  # fmt: skip
_IGNORED: Final = {
    "monitor-interval": "agents are told of an end at once",
    "role": "a run has one role",
    "node-rank": "ranks are agreed upon",
    "master-addr": "rank 0 is agreed upon",
    "master-port": "rank 0 is agreed upon",
    "local-addr": "nodes find their address by the route to etcd",
    "redirects": "each worker's output is kept anyway",
    "tee": "each worker's output is kept anyway",
    "local-ranks-filter": "each worker's output is kept anyway",
    "logs-specs": "each worker's output is kept anyway",
    "event-log-handler": "events are in the run's report",
    "numa-binding": "workers are not bound",
    "signals-to-handle": "SIGTERM and SIGINT always are",
    "run-path": "the program is named as it is",
    "virtual-local-rank": "LOCAL_RANK counts from 0 on each node",
    "node-unit": "nodes come and go one by one",
    "network-check": "a node that cannot be reached is left out anyway",
    "exclude-straggler": "nodes are not measured before they train",
    "comm-perf-test": "nodes are not measured before they train",
    "precheck": "nodes are not measured before they train",
    "accelerator": "a GPU is used where there is one",
    "auto-config": "nodes and workers are what the job says",
    "auto-tunning": "the script's options stay its own",
    "save-at-breakpoint": "the script writes its own checkpoints",
    "training-port": "ports are agreed upon",
}
_ALONE: Final = frozenset(
    ("run-path", "network-check", "exclude-straggler", "comm-perf-test", "auto-config", "auto-tunning")
)
"""Ignored flags that take no value."""

_ASSIGNMENT: Final = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*=")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a command line asks for.

    Attributes:
        said: Names of the flags that were given, by flag or by variable.
        workers: Workers of a node: a number, auto, gpu or cpu.
        waits: The job's timeouts.
        kind: What `program` is.
        ignored: Flags without a meaning here, with the reason.
    """

    program: str
    args: tuple[str, ...] = ()
    kind: Literal["script", "module", "program"] = "script"
    nodes: tuple[int, int] = (1, 1)
    workers: str = "1"
    backend: str = ""
    endpoint: str = ""
    run: str = ""
    restarts: int | None = None
    start_method: str = ""
    waits: Mapping[str, float] = field(default_factory=dict)
    standalone: bool = False
    said: frozenset[str] = frozenset()
    ignored: Mapping[str, str] = field(default_factory=dict)


def is_launcher(words: Sequence[str]) -> bool:
    """Return whether words are a command that starts workers, `PET_X=… torchrun …` included."""
    rest = _without_assignments(words)
    return bool(rest) and (_launcher_length(rest) > 0 or PurePath(rest[0]).name.startswith("python"))


def read_command(words: Sequence[str], variables: Mapping[str, str] | None = None) -> Launch:
    """Understand a whole command line.

    Args:
        words: `[NAME=VALUE …] torchrun FLAGS PROGRAM ARGS`, or `python PROGRAM ARGS`.
        variables: Values for `$NAME` in it.

    Raises:
        RefusedInput: Every mistake.
    """
    rest = _without_assignments(words)
    before = words[: len(words) - len(rest)]
    settings = dict(word.split("=", 1) for word in before if _ASSIGNMENT.match(word))
    if not rest:
        raise RefusedInput(["the command line names no program"])
    length = _launcher_length(rest)
    if length:
        return read_flags(rest[length:], settings=settings, variables=variables)
    if PurePath(rest[0]).name.startswith("python"):  # one worker, started by hand
        return read_flags(_python(rest[1:]), settings=settings, variables=variables)
    raise RefusedInput(
        [f"{rest[0]!r} starts no workers that are known here; known: {', '.join(LAUNCHERS)}, python -m …"]
    )


def read_flags(
    words: Sequence[str],
    *,
    settings: Mapping[str, str] | None = None,
    variables: Mapping[str, str] | None = None,
) -> Launch:
    """Understand a launcher's flags, its program and the program's arguments.

    Args:
        words: What follows the launcher's name.
        settings: Variables like PET_NNODES, which stand for flags that are not given.
        variables: Values for `$NAME` in flags.

    Raises:
        RefusedInput: Every mistake.
    """
    return _Reader(settings or {}, variables or {}).read(words)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedInput([f"the command line: {message}"])


class _Reader:
    """Turns options into a launch and collects every mistake."""

    def __init__(self, settings: Mapping[str, str], variables: Mapping[str, str]) -> None:
        self._settings = settings
        self._variables = variables
        self._problems: list[str] = []
        self._ignored: dict[str, str] = {}

    def read(self, words: Sequence[str]) -> Launch:
        """Return the launch.

        Raises:
            RefusedInput: All mistakes.
        """
        options, unknown = _make_parser().parse_known_args(list(words))
        self._refuse_unknown(unknown)
        given = {name: value for name, value in vars(options).items() if value not in (None, False)}
        said = frozenset(given) | frozenset(
            name for name in _names(_VALUED) if f"PET_{name.upper()}" in self._settings
        )
        for name in _names(_IGNORED):
            if name in given:
                self._ignored[f"--{name.replace('_', '-')}"] = _IGNORED[name.replace("_", "-")]
        launch = Launch(
            program=options.program,
            args=tuple(options.args),
            kind="module" if options.module else "program" if options.no_python else "script",
            nodes=self._nodes(self._value(options, "nnodes")),
            workers=self._workers(self._value(options, "nproc_per_node")),
            backend=self._value(options, "rdzv_backend"),
            endpoint=self._value(options, "rdzv_endpoint"),
            run=self._value(options, "rdzv_id"),
            restarts=self._number("--max-restarts", self._value(options, "max_restarts")),
            start_method=self._value(options, "start_method"),
            waits=self._waits(options),
            standalone=options.standalone,
            said=said,
            ignored=self._ignored,
        )
        if self._problems:
            raise RefusedInput([f"the command line: {problem}" for problem in self._problems])
        return launch

    def _value(self, options: argparse.Namespace, name: str) -> str:
        value = getattr(options, name)
        if value is None:
            value = self._settings.get(f"PET_{name.upper()}", _VALUED[name.replace("_", "-")])
        return re.sub(r"\$\{?(\w+)\}?", lambda found: self._variables.get(found[1], found[0]), str(value))

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        known = [f"--{name}" for name in (*_VALUED, *_IGNORED, "standalone", "no-python", "module")]
        for word in words:
            flag = word.split("=")[0].replace("_", "-")
            self._problems.append(f"unknown flag {word.split('=')[0]!r}{nearest(flag, known)}")

    def _nodes(self, text: str) -> tuple[int, int]:
        match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
        if not match:
            unset = "; it is not set here, write a number" if "$" in text else ""
            self._problems.append(f"--nnodes {text!r}: write a number, or MIN:MAX{unset}")
            return 1, 1
        return int(match[1]), int(match[2] or match[1])

    def _workers(self, text: str) -> str:
        if text not in ("auto", "gpu", "cpu") and not (re.fullmatch(r"\d{1,4}", text) and int(text) > 0):
            self._problems.append(f"--nproc-per-node {text!r}: must be a number, auto, gpu or cpu")
        return text

    def _number(self, flag: str, text: str) -> int | None:
        if not text:
            return None
        if not re.fullmatch(r"\d{1,9}", text):
            self._problems.append(f"{flag} {text!r}: must be a whole number, 0 or more")
            return None
        return int(text)

    def _waits(self, options: argparse.Namespace) -> dict[str, float]:
        waits: dict[str, float] = {}
        for part in filter(None, self._value(options, "rdzv_conf").split(",")):
            key, _, text = part.strip().partition("=")
            if key not in WAITS:
                self._ignored[f"--rdzv-conf {key}"] = f"it has no meaning with etcd v3{nearest(key, WAITS)}"
            elif (seconds := self._seconds(f"--rdzv-conf {key}", text)) is not None:
                waits[WAITS[key]] = seconds
        grace = self._value(options, "shutdown_timeout")
        if grace and (seconds := self._seconds("--shutdown-timeout", grace)) is not None:
            waits["stop_grace"] = seconds
        return waits

    def _seconds(self, flag: str, text: str) -> float | None:
        if not re.fullmatch(r"\d{1,9}(\.\d{1,9})?", text):
            self._problems.append(f"{flag} {text!r}: must be seconds")
            return None
        return float(text)


def _make_parser() -> _Parser:
    parser = _Parser(prog="torchrun", add_help=False)
    for name in _VALUED:
        _add(parser, name)
    for name in _IGNORED:
        short = {"redirects": ("-r",), "tee": ("-t",)}.get(name, ())
        _add(parser, name, *short, alone=name in _ALONE)
    _add(parser, "standalone", alone=True)
    _add(parser, "no-python", alone=True)
    _add(parser, "module", "-m", alone=True)
    parser.add_argument("program")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser


def _add(parser: argparse.ArgumentParser, name: str, *short: str, alone: bool = False) -> None:
    flags = dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}"))
    options: dict[str, Any] = {"action": "store_true"} if alone else {}
    parser.add_argument(*flags, *short, dest=name.replace("-", "_"), **options)


def _names(flags: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name.replace("-", "_") for name in flags)


def _without_assignments(words: Sequence[str]) -> Sequence[str]:
    rest = words[1:] if words and words[0] == "env" else words
    while rest and _ASSIGNMENT.match(rest[0]):
        rest = rest[1:]
    return rest


def _launcher_length(words: Sequence[str]) -> int:
    """Return how many words name the launcher; 0 if none does."""
    if PurePath(words[0]).name in LAUNCHERS:
        return 1
    is_python = PurePath(words[0]).name.startswith("python")
    rest = [word for word in words[1:4] if word != "-u"]
    if is_python and len(rest) > 1 and rest[0] == "-m" and rest[1] in MODULES:
        return words.index(rest[1]) + 1
    return 0


def _python(words: Sequence[str]) -> Sequence[str]:
    """Return an interpreter's arguments as a launcher takes them; its own flags are left out."""
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-m":
        rest.pop(0)
    return rest
