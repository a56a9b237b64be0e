"""The worker group: all worker processes of one node, started and stopped as a unit.

The agent's main thread starts one fork server; workers are forked by it, so that
they die with it and it dies with the agent. One thread reads both the fork server
and the workers' socket, so that what a worker said comes before that it exited.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elastic_core.agent.process import Entrypoint
from elastic_core.clock import Clock
from elastic_core.model.failure import WorkerExit
from elastic_core.model.messages import AgentMessage, WorkerMessage

__all__ = [
    "Entrypoint",
    "ForkServerLost",
    "ForkServerWarmed",
    "WorkerEvent",
    "WorkerExited",
    "WorkerGroup",
    "WorkerSaid",
    "WorkerSpec",
    "WorkersStopped",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the workers of a node are.

    Attributes:
        slots: Workers on this node, the local world size.
        api: "torchrun": started for one generation each; "elastic": they outlive generations.
        preload: Modules that the fork server imports before workers start.
        log_dir: Each worker's output goes to `worker-<local rank>.log` in it, appended over
            restarts; None: workers write where the agent writes.
        environment: The whole base environment of all workers; nothing is inherited beside it.
    """

    slots: int
    api: Literal["torchrun", "elastic"]
    entrypoint: Entrypoint
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    start_method: Literal["fork", "spawn"] = "fork"
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerWarmed:
    """Workers can start now.

    Attributes:
        seconds: From `warm()` to here.
        notice: Why workers are spawned although forking was asked for, else "". Say it to people.
    """

    seconds: float
    notice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerLost:
    """The fork server died, and all workers with it: `WorkerExited` (code -9) came for each before.

    `warm()` starts a new one.
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSaid:
    """A worker sent a message."""

    local_rank: int
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExited:
    """A worker's main process ended; all that it said was delivered before.

    What it left behind in its session has been killed. Also comes for workers that `stop` ends.
    """

    exit: WorkerExit


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    """What `stop` was asked for is done: no worker lives."""


WorkerEvent = ForkServerWarmed | ForkServerLost | WorkerSaid | WorkerExited | WorkersStopped


class WorkerGroup:
    """Starts, addresses and ends the workers of one node."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        events: Callable[[WorkerEvent], None],
        socket_dir: Path,
        clock: Clock,
    ) -> None:
        """Prepare the group; nothing is started before `warm`.

        Args:
            spec: What to run.
            events: Called from the group's own thread with each event; must only enqueue.
            socket_dir: An existing private directory with a short path (sockets: 107 bytes at most).
            clock: For durations and grace times.
        """
        raise NotImplementedError

    @property
    def socket_path(self) -> Path:
        """The workers' socket; the group itself sets `ELASTIC_AGENT_SOCKET` for them."""
        raise NotImplementedError

    def warm(self) -> None:
        """Start the fork server if there is none; `ForkServerWarmed` or `ForkServerLost` follows.

        Must be called from the agent's main thread: the kernel ties the fork server's life to
        the thread that started it.
        """
        raise NotImplementedError

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one worker per local rank, each with its variables on top of the spec's.

        May be called before `ForkServerWarmed`: the request then waits for it. The previous
        workers must have ended (`WorkersStopped`, or `WorkerExited` for each).

        Raises:
            ValueError: There are not as many environments as slots, or a worker still runs.
        """
        raise NotImplementedError

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Start the worker of one local rank anew.

        Raises:
            ValueError: The rank is out of range, or its worker still runs.
        """
        raise NotImplementedError

    def send(self, message: AgentMessage) -> None:
        """Send a message to all workers that said `WorkerAttached`; never blocks."""
        raise NotImplementedError

    def stop(self, grace_s: float) -> None:
        """End all workers: SIGTERM to their main processes only, after the grace SIGKILL to their sessions.

        Returns at once; `WorkersStopped` comes when none lives (also if none did). A second call
        can only shorten the grace; 0 kills at once.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Kill everything, end the threads and remove the sockets; no event comes after it."""
        raise NotImplementedError

    def log_tail(self, local_rank: int, lines: int = 20) -> str:
        """Return the last lines that a worker wrote, or "" where its output goes to the agent's."""
        raise NotImplementedError
