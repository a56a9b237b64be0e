"""Local nodes: each is a session of processes on this machine.

Truth is on disk and in /proc, not in this object: one record a node under
`<runs>/<run>/nodes/`, written before the process is started, and a mark in the
environment that every process of the node inherits. A flow that was killed at
any moment can so be followed by one in another process that adopts the nodes.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from elastic_core.cluster.provider import (
    Instance,
    InstanceState,
    InterruptionNotice,
    LaunchRequest,
    LaunchResult,
)
from elastic_core.errors import ProviderUnavailable
from elastic_core.exits import exit_code_of
from elastic_core.ids import RunId
from elastic_core.model.codec import decode, encode
from tasks.process import ProcessIdentity, carrying, end, identify, is_running, send, spawn

NODE_MARK: Final = "ELASTIC_NODE_RECORD"
"""Environment variable with the path of the node's record, in every process of the node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeOnDisk:
    """The record of one local node.

    Attributes:
        process: Its agent; None until it was started.
        exit_code: What the agent ended with, once it is known.
        terminating: Whether its end was asked for.
    """

    name: str
    token: str
    log: str
    launched_at: float
    process: ProcessIdentity | None = None
    exit_code: int | None = None
    terminating: bool = False


class LocalProvider:
    """Nodes as processes of this machine (`elastic_core.cluster.provider.NodeProvider`).

    Args:
        runs: Directory of all runs' directories.
        grace_s: Time between SIGTERM to an agent and SIGKILL to all of its node.
        agent: Module that is run as the agent.
    """

    def __init__(self, runs: Path, *, grace_s: float = 5.0, agent: str = "elastic_core.agent") -> None:
        self._runs = runs.absolute()
        self._grace_s = grace_s
        self._agent = agent
        self._children: dict[int, int | None] = {}  # pid of a child of ours -> its status once reaped

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Start agents; nodes that the token made before are returned as they are."""
        with self._locked(request.run):
            known = list(self._records(request.run))
            mine = [node for node in known if node.token == request.token]
            missing = range(len(known) + 1, len(known) + 1 + request.count - len(mine))
            mine.extend([self._intend(request, f"node-{number}") for number in missing])
            return LaunchResult(launched=tuple(self._started(request, node) for node in mine))

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """SIGTERM the agents, wait, then SIGKILL whatever is left of the nodes."""
        if not self._directory(run).exists():
            return
        with self._locked(run):
            ending = [node for node in self._records(run) if node.name in names]
            for node in ending:
                if not node.terminating:
                    self._write(run, replace(node, terminating=True))
        end([node.process for node in ending if node.process], self._grace_s)
        end([process for node in ending for process in self._processes(run, node)], 0)

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return all nodes that were ever launched for a run, by age."""
        if not self._directory(run).exists():
            return ()
        with self._locked(run):
            return [self._instance(run, node) for node in self._records(run)]

    def interruptions(self, run: RunId) -> Sequence[InterruptionNotice]:  # noqa: ARG002
        """Return nothing: this machine takes no node away."""
        return ()

    def teardown(self, run: RunId) -> None:
        """End all nodes of a run; their records stay, as its history."""
        self.terminate(run, [node.name for node in self._records(run)])

    def kill(self, run: RunId, name: str) -> None:
        """End everything of a node at once and without a word, as a power cut would: for demonstrations."""
        for node in self._records(run):
            if node.name == name:
                for process in self._processes(run, node):
                    send(process, signal.SIGKILL)

    # ---- starting ----------------------------------------------------------------------------

    def _intend(self, request: LaunchRequest, name: str) -> NodeOnDisk:
        log = self._runs / request.run / "logs" / name / "agent.log"
        node = NodeOnDisk(name=name, token=request.token, log=str(log), launched_at=time.time())
        self._write(request.run, node)
        return node

    def _started(self, request: LaunchRequest, node: NodeOnDisk) -> Instance:
        """Start a node that was only intended so far."""
        node = self._found(request.run, node)
        if node.process is None:
            node = replace(node, process=self._spawn(request, node))
            self._write(request.run, node)
        return self._instance(request.run, node)

    def _spawn(self, request: LaunchRequest, node: NodeOnDisk) -> ProcessIdentity:
        record = self._path(request.run, node.name)
        # What steers the orchestrator does not belong on a node, its credentials least of all.
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("PREFECT_")}
        try:
            pid = spawn(
                [
                    *(sys.executable, "-m", "tasks.providers.local_agent", str(self._exit_file(record))),
                    *(self._agent, "--name", node.name, *request.command),
                ],
                environment={**inherited, **request.environment, NODE_MARK: str(record)},
                log=Path(node.log),
            )
        except OSError as error:
            raise ProviderUnavailable(f"node {node.name} could not be started: {error.strerror}") from error
        self._children[pid] = None
        # A child that is not reaped yet keeps its pid, so this cannot be a stranger.
        return identify(pid) or ProcessIdentity(pid=pid, start_ticks=0, boot="")

    # ---- looking -----------------------------------------------------------------------------

    def _found(self, run: RunId, node: NodeOnDisk) -> NodeOnDisk:
        """Return a node with its process, also where its starter died before it wrote that down."""
        if node.process is not None or not (orphans := self._processes(run, node)):
            return node
        node = replace(node, process=orphans[0])
        self._write(run, node)
        return node

    def _instance(self, run: RunId, node: NodeOnDisk) -> Instance:
        node = self._found(run, node)
        if node.process is not None and is_running(node.process):
            state = InstanceState.STOPPING if node.terminating else InstanceState.RUNNING
            return Instance(name=node.name, state=state, address="127.0.0.1", log=node.log)
        if node.process is not None and node.exit_code is None:
            node = replace(node, exit_code=self._exit_code(run, node.name, node.process.pid))
            self._write(run, node)
        return Instance(
            name=node.name,
            state=InstanceState.ENDED,
            exit_code=node.exit_code,
            detail=self._detail(node),
            log=node.log,
        )

    def _exit_code(self, run: RunId, name: str, pid: int) -> int | None:
        """Return the agent's exit code: as its parent if we are, else from its own note."""
        if self._children.get(pid, 0) is None:
            reaped, status = os.waitpid(pid, os.WNOHANG)
            if reaped:
                self._children[pid] = os.waitstatus_to_exitcode(status)
        returncode = self._children.get(pid)
        if returncode is not None:
            return exit_code_of(returncode)
        try:
            return int(self._exit_file(self._path(run, name)).read_text())
        except (OSError, ValueError):
            return None

    @staticmethod
    def _detail(node: NodeOnDisk) -> str:
        if node.process is None:
            return "was never started"
        if node.terminating:
            return "ended on request"
        if node.exit_code is None:
            return "was killed"
        return f"killed by signal {node.exit_code - 128}" if node.exit_code > 128 else ""

    def _processes(self, run: RunId, node: NodeOnDisk) -> list[ProcessIdentity]:
        """Return everything that runs of a node, its oldest process first."""
        found = carrying(NODE_MARK, str(self._path(run, node.name)))
        return sorted(found, key=lambda process: (process.start_ticks, process.pid))

    # ---- disk --------------------------------------------------------------------------------

    def _directory(self, run: RunId) -> Path:
        return self._runs / run / "nodes"

    def _path(self, run: RunId, name: str) -> Path:
        return self._directory(run) / f"{name}.json"

    @staticmethod
    def _exit_file(record: Path) -> Path:
        return record.with_suffix(".exit_code")

    def _records(self, run: RunId) -> Iterator[NodeOnDisk]:
        nodes = [decode(NodeOnDisk, path.read_bytes()) for path in self._directory(run).glob("node-*.json")]
        yield from sorted(nodes, key=lambda node: int(node.name.removeprefix("node-")))

    def _write(self, run: RunId, node: NodeOnDisk) -> None:
        path = self._path(run, node.name)
        draft = path.with_suffix(".draft")
        draft.write_bytes(encode(node))
        draft.replace(path)

    @contextmanager
    def _locked(self, run: RunId) -> Iterator[None]:
        directory = self._directory(run)
        directory.mkdir(parents=True, exist_ok=True)
        with (directory / ".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
