"""Nodes of a measurement, and the commands by which each peer starts them.

A node is a session of its own. Its processes are found by a variable in their
environment that nobody else has, so that only they are ever signalled.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from elastic_core.store.server import EtcdOptions, EtcdServer

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "scripts" / "steps.py"

NODES = "2:3"
"""Least and most nodes of every run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """Something that keeps a training alive.

    Attributes:
        command: Its command line; `{endpoint}` and `{run}` are filled in.
        store: What is at the endpoint: an etcd, torchft's lighthouse, or what its first node opens there.
        environment: Of its nodes; filled in likewise.
        flags: Of its lighthouse.
        module: What must be installed for it.
    """

    name: str
    command: tuple[str, ...]
    store: Literal["etcd", "lighthouse", "first node"]
    environment: Mapping[str, str] = field(default_factory=dict)
    flags: tuple[str, ...] = ()
    module: str = ""


_TORCHRUN = (
    sys.executable, "-m", "torch.distributed.run", f"--nnodes={NODES}", "--nproc-per-node=1",
    "--max-restarts=100", "--rdzv-endpoint={endpoint}", "--rdzv-id={run}",
)  # fmt: skip
_AGENT = (
    sys.executable, "-m", "elastic_core.agent", f"--nnodes={NODES}", "--nproc-per-node=1",
    "--max-restarts=100", "--rdzv-endpoint={endpoint}", "--rdzv-id={run}",
)  # fmt: skip

_TORCHFT = (
    sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=1", "--max-restarts=100",
    "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(SCRIPT.with_name("torchft_steps.py")),
)  # fmt: skip

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            name="torchrun",
            command=(*_TORCHRUN, "--rdzv-backend=c10d", str(SCRIPT)),
            store="first node",
        ),
        Peer(
            name="torchrun-noshare",
            command=(*_TORCHRUN, "--rdzv-backend=c10d", str(SCRIPT)),
            store="first node",
            environment={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        ),
        Peer(
            name="torchrun-etcd3",
            command=(*_TORCHRUN, "--rdzv-backend=etcd3", str(SCRIPT)),
            store="etcd",
        ),
        Peer(
            name="torchft",
            command=_TORCHFT,
            store="lighthouse",
            environment={"TORCHFT_LIGHTHOUSE": "http://{endpoint}"},
            module="torchft",
        ),
        Peer(
            name="torchft-tuned",
            command=_TORCHFT,
            store="lighthouse",
            environment={"TORCHFT_LIGHTHOUSE": "http://{endpoint}"},
            flags=("--heartbeat_timeout_ms=1000", "--join_timeout_ms=1000", "--quorum_tick_ms=20"),
            module="torchft",
        ),
        Peer(name="elastic", command=(*_AGENT, str(SCRIPT)), store="etcd"),
        Peer(
            name="elastic-api",
            command=(
                *_AGENT,
                "--worker-api=elastic",
                "--preload=elastic_core.testing.toy_trainee",
                "--preload=elastic_core.trainer.loop",
                "-m",
                "benchmarks.scripts.elastic_steps",
            ),
            store="etcd",
        ),
    )
}


class Node:
    """One node with one worker."""

    def __init__(self, name: str, command: tuple[str, ...], directory: Path, more: Mapping[str, str]) -> None:
        self.name = name
        self._mark = f"{name}-{secrets.token_hex(8)}"
        environment = {**os.environ, **more, "BENCH_NODE": self._mark, "BENCH_DIRECTORY": str(directory)}
        with (directory / f"{name}.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def pids(self) -> list[int]:
        """Return all processes of the node, its launcher first."""
        wanted = f"BENCH_NODE={self._mark}".encode()
        found = []
        for path in (process / "environ" for process in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if wanted in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return sorted(found, key=lambda pid: pid != self._process.pid)

    def kill(self) -> float:
        """Kill everything at once, as a power cut would, until nothing is left; return when it began."""
        deadline = time.monotonic() + 10
        began = 0.0
        while pids := self.pids():
            if time.monotonic() > deadline:
                raise TimeoutError(f"processes {pids} of {self.name} do not die")
            began = began or time.time()
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process.poll()  # reaped, it is not found again
        self._process.wait()
        return began


class Cluster:
    """The nodes of one measurement."""

    def __init__(self, peer: Peer, directory: Path, endpoint: str) -> None:
        self.directory = directory
        self._peer = peer
        self._endpoint = endpoint
        self._run = f"bench-{secrets.token_hex(4)}"
        self.nodes: list[Node] = []

    def start(self, count: int) -> None:
        """Start more nodes; the first one of a peer without etcd must be up before the next."""
        for _ in range(count):
            command = tuple(map(self._filled, self._peer.command))
            own = {name: self._filled(value) for name, value in self._peer.environment.items()}
            environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **own}
            self.nodes.append(Node(f"node-{len(self.nodes)}", command, self.directory, environment))
            if self._peer.store == "first node" and len(self.nodes) == 1:
                _wait_open(self._endpoint, 60)

    def _filled(self, text: str) -> str:
        return text.format(endpoint=self._endpoint, run=self._run)

    def node_of(self, pid: int) -> Node:
        """Return the node that a process belongs to."""
        return next(node for node in self.nodes if pid in node.pids())

    def end(self) -> None:
        """Kill all nodes."""
        for node in self.nodes:
            node.kill()


@contextmanager
def cluster(peer: Peer, directory: Path) -> Iterator[Cluster]:
    """Give an empty cluster with its endpoint; everything ends with it."""
    with contextlib.ExitStack() as stack:
        endpoint = f"127.0.0.1:{_free_port()}"
        if peer.store == "etcd":
            options = EtcdOptions(ends_with_parent=True)
            endpoint = stack.enter_context(EtcdServer(directory / "etcd", options)).endpoint
        elif peer.store == "lighthouse":
            stack.enter_context(_lighthouse(peer, directory, endpoint))
        made = Cluster(peer, directory, endpoint)
        stack.callback(made.end)
        yield made


@contextmanager
def _lighthouse(peer: Peer, directory: Path, endpoint: str) -> Iterator[None]:
    """Run torchft's lighthouse; it lies beside the interpreter that has torchft."""
    program = Path(sys.executable).with_name("torchft_lighthouse")
    command = [str(program), "--min_replicas=2", f"--bind={endpoint}", *peer.flags]
    with (directory / "lighthouse.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait_open(endpoint, 60)
        yield
    finally:
        process.kill()
        process.wait()


def is_installed(peer: Peer) -> bool:
    """Return whether what a peer needs beyond this project is there."""
    return not peer.module or find_spec(peer.module) is not None


def _free_port() -> int:
    """Return a port that is free, outside the range from which the kernel gives ports away."""
    while True:
        port = 20_000 + secrets.randbelow(10_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _wait_open(endpoint: str, timeout_s: float) -> None:
    host, _, port = endpoint.rpartition(":")
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on {endpoint} after {timeout_s:.0f} s")
