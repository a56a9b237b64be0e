"""Real agents as processes, and the facts of their run, awaited without polling.

For tests and measurements: start agents against an etcd, do something to them, and
wait for what the store says. Everything that was started ends with the object.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

from elastic_core.ids import RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Generation, Stop, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry, Progress, Resumption
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import KeyDeleted, KeyWritten, Store, WatchRestarted

T = TypeVar("T")

DEADLINE_S: Final = 60.0
"""Bounds every wait; nothing takes so long unless it hangs."""


class AgentProcess:
    """One agent, in a session of its own, with its output in a file."""

    def __init__(
        self, name: str, command: Sequence[str], *, log: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(environment),
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._process.pid

    def signal(self, number: signal.Signals) -> None:
        """Signal the agent's whole process group, as a container's stop or a terminal does."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def kill(self) -> None:
        """Kill the agent alone; its node dies with it."""
        self._process.kill()

    def freeze(self) -> None:
        """Stop the agent and all of its processes, as a node that hangs."""
        for pid in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def kill_all(self) -> None:
        """Kill the agent and all of its processes at once, as a power cut does."""
        for pid in (self.pid, *descendants(self.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def workers(self) -> list[int]:
        """Return the process ids of the node's workers."""
        return [pid for pid in descendants(self.pid) if _name(pid).startswith("worker-") and _leads(pid)]

    def thaw(self) -> None:
        """Let a frozen node go on."""
        for pid in (*descendants(self.pid), self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Return the exit code: minus the signal if one ended it.

        Raises:
            AssertionError: It did not end in time; the message holds the end of its log.
        """
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"agent {self.name} did not end within {timeout_s} s:\n{self.output()[-4000:]}"
            ) from None

    @property
    def is_running(self) -> bool:
        """Whether the agent has not ended."""
        return self._process.poll() is None

    def output(self) -> str:
        """Return all that the agent, and workers without a log of their own, wrote."""
        return self.log.read_text(errors="replace")

    def last_lines(self, count: int = 10) -> list[str]:
        """Return the end of the output."""
        return self.output().splitlines()[-count:]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the store says of a run, and what it has said: generations are kept when they are deleted."""

    nodes: Mapping[str, NodeRecord]
    history: Mapping[int, HistoryEntry]
    resumed: Mapping[int, Resumption]
    failures: Sequence[Failure]
    current: Generation | None
    progress: Progress | None
    closed: Closed | None
    leader: str

    def ready(self) -> int:
        """Count the nodes that can train, or do."""
        return sum(record.phase is NodePhase.READY for record in self.nodes.values())

    def entered(self, number: int) -> bool:
        """Tell whether all members act on a generation."""
        entry = self.history.get(number)
        return entry is not None and all(
            (record := self.nodes.get(member.node_id)) is not None and record.generation >= number
            for member in entry.members
        )


class AgentRun:
    """A run's agents, started here, and its facts, followed by a watch."""

    def __init__(self, store: Store, endpoint: str, run: str, directory: Path) -> None:
        """Follow a run; `directory` takes the agents' logs."""
        self.keys = RunKeys(RunId(run))
        self.directory = directory
        self.agents: dict[str, AgentProcess] = {}
        self._store = store
        self._endpoint = endpoint
        self._changed = threading.Condition()
        self._values: dict[str, bytes] = {}
        self._history: dict[int, HistoryEntry] = {}
        self._watch = store.watch([], [self.keys.prefix])
        self._thread = threading.Thread(target=self._follow, name="run-facts", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(
        self,
        name: str,
        *arguments: str,
        environment: Mapping[str, str] | None = None,
        within: Sequence[str] = (),
    ) -> AgentProcess:
        """Start an agent; the arguments follow those that name run, store and instance.

        `within` is a command that becomes the agent, as `ip netns exec NAME` does.
        """
        known = [f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.keys.run}", f"--name={name}"]
        agent = AgentProcess(
            name,
            [*within, sys.executable, "-m", "elastic_core.agent", *known, *arguments],
            log=self.directory / f"{name}-{len(self.agents)}.log",
            environment={**os.environ, **(environment or {})},
        )
        self.agents[f"{name}-{len(self.agents)}"] = agent
        return agent

    def wait_for(self, holds: Callable[[Facts], T | None], what: str, timeout_s: float = DEADLINE_S) -> T:
        """Return what `holds` returns as soon as that is true.

        Raises:
            AssertionError: Not in time; the message holds the facts and the ends of the agents' logs.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not (found := holds(self._facts())):
                left = deadline - time.monotonic()
                if left <= 0:
                    raise AssertionError(f"not within {timeout_s} s: {what}\n{self._story()}")
                self._changed.wait(left)
            return found

    def wait_entered(self, number: int, timeout_s: float = DEADLINE_S) -> HistoryEntry:
        """Wait until all members act on a generation, and return its entry."""
        return self.wait_for(
            lambda facts: facts.history[number] if facts.entered(number) else None,
            f"generation {number} is entered",
            timeout_s,
        )

    def wait_step(self, step: int, timeout_s: float = DEADLINE_S) -> Progress:
        """Wait until rank 0 told of a step at least so high."""
        return self.wait_for(
            lambda facts: facts.progress if facts.progress and facts.progress.step >= step else None,
            f"step {step} is done",
            timeout_s,
        )

    def wait_closed(self, timeout_s: float = DEADLINE_S) -> Closed:
        """Wait for the outcome."""
        return self.wait_for(lambda facts: facts.closed, "the run is closed", timeout_s)

    def facts(self) -> Facts:
        """Return what is known now."""
        with self._changed:
            return self._facts()

    def request_target(self, nodes: int) -> None:
        """Ask for a number of nodes, as a flow does."""
        self._store.put(self.keys.target, encode(Target(nodes=nodes)))

    def request_stop(self, reason: str = "asked by the test") -> None:
        """Ask the run to stop, as a flow does."""
        self._store.put(self.keys.stop, encode(Stop(reason=reason)))

    def close(self) -> None:
        """Kill every agent that still runs, and stop following."""
        for agent in self.agents.values():
            if agent.is_running:
                agent.thaw()
                agent.kill()
                agent.wait()
        self._watch.close()
        self._thread.join(timeout=5)

    # ---- following ---------------------------------------------------------------------------

    def _follow(self) -> None:
        for event in self._watch:
            with self._changed:
                match event:
                    case WatchRestarted(snapshot=snapshot):
                        self._values = {entry.key: entry.value for entry in snapshot.entries}
                        for entry in snapshot.entries:
                            self._keep_history(entry.key, entry.value)
                    case KeyWritten(entry=entry):
                        self._values[entry.key] = entry.value
                        self._keep_history(entry.key, entry.value)
                    case KeyDeleted(key=key):
                        self._values.pop(key, None)
                self._changed.notify_all()

    def _keep_history(self, key: str, value: bytes) -> None:
        if key.startswith(self.keys.history):
            entry = decode(HistoryEntry, value)
            self._history[entry.generation.number] = entry

    def _facts(self) -> Facts:
        keys = self.keys
        resumptions = (decode(Resumption, value) for value in self._under(keys.resumptions))
        records = (decode(NodeRecord, value) for value in self._under(keys.nodes))
        return Facts(
            nodes={record.node_id: record for record in records},
            history=dict(self._history),
            resumed={resumption.generation: resumption for resumption in resumptions},
            failures=[decode(Failure, value) for value in self._under(keys.failures)],
            current=self._one(Generation, keys.current),
            progress=self._one(Progress, keys.progress),
            closed=self._one(Closed, keys.closed),
            leader=self._values.get(keys.leader, b"").decode(),
        )

    def _under(self, prefix: str) -> list[bytes]:
        return [value for key, value in self._values.items() if key.startswith(prefix)]

    def _one(self, kind: type[T], key: str) -> T | None:
        value = self._values.get(key)
        return None if value is None else decode(kind, value)

    def _story(self) -> str:
        lines = [f"{key} = {value[:300]!r}" for key, value in sorted(self._values.items())]
        for name, agent in self.agents.items():
            lines.append(f"---- {name} ({'running' if agent.is_running else 'ended'})")
            lines += agent.last_lines(25)
        return "\n".join(lines)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _leads(pid: int) -> bool:
    """Whether a process leads its session, as a worker does and its loaders do not."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def descendants(pid: int) -> list[int]:
    """Return all processes below one, whichever session they are in, parents first."""
    children: dict[int, list[int]] = {}
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = [pid]
    for process in found:
        found += children.get(process, [])
    return found[1:]
