"""The worker group: all worker processes of one node, started and stopped as a unit.

The agent's main thread starts one fork server; workers are forked by it, so that
they die with it and it dies with the agent. One thread reads both the fork server
and the workers' socket, so that what a worker said comes before that it exited.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from elastic_core.agent.channel import WorkerListener
from elastic_core.agent.process import Entrypoint, Launch
from elastic_core.agent.server_process import ServerProcess, tail
from elastic_core.channel import AGENT_SOCKET, WORKER_LAUNCH
from elastic_core.clock import Clock
from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure, WorkerExit
from elastic_core.model.messages import AgentMessage, WorkerFailed, WorkerMessage

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

START_REFUSED: Final = 71
"""Exit code of a worker for which the system gave no process (`EX_OSERR`)."""

_KILL_S: Final = 2.0
"""Seconds after a kill until the fork server itself is killed, which ends workers that nothing else did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec:
    """What the workers of a node are.

    Attributes:
        slots: Workers on this node, the local world size.
        api: "torchrun": started for one generation each; "elastic": they outlive generations.
        preload: Modules that the fork server imports before workers start.
        preflight: Have the fork server see whether this node computes before it says that it is warm.
        log_dir: Each worker's output goes to `worker-<local rank>.log` in it, appended over
            restarts; None: workers write where the agent writes.
        environment: The whole base environment of all workers; nothing is inherited beside it.
        warm_timeout_s: The fork server is given up if it is not warm after so long.
    """

    slots: int
    api: Literal["torchrun", "elastic"]
    entrypoint: Entrypoint
    args: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    start_method: Literal["fork", "spawn"] = "fork"
    preflight: bool = False
    log_dir: Path | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    warm_timeout_s: float = 300.0


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

    Attributes:
        exit_code: For an agent that ends because of it.
    """

    reason: str
    exit_code: int = ExitCode.FAILED


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


@dataclass(slots=True)
class _Worker:
    """A worker that was asked for and has not ended.

    Attributes:
        process: A descriptor of its process (pidfd), -1 before the fork server made it.
    """

    launch: Launch
    pid: int = 0
    process: int = -1


class WorkerGroup:
    """Starts, addresses and ends the workers of one node. Its methods may be called from any thread."""

    def __init__(
        self,
        *,
        spec: WorkerSpec,
        events: Callable[[WorkerEvent], None],
        socket_dir: Path,
        clock: Clock,
    ) -> None:
        """Prepare the group; no process is started before `warm`.

        Args:
            spec: What to run.
            events: Called from the group's own thread with each event; must only enqueue.
            socket_dir: An existing private directory with a short path (sockets: 107 bytes at most).
            clock: For durations and grace times.

        Raises:
            ValueError: The socket's path is too long.
        """
        self._spec = spec
        self._events = events
        self._clock = clock
        self._directory = str(Path.cwd())
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._workers: dict[int, _Worker] = {}
        self._server: ServerProcess | None = None
        self._warming_since = 0.0
        self._stopping = False
        self._kill_at: float | None = None
        self._give_up_at: float | None = None
        self._closing = False
        if spec.log_dir is not None:
            spec.log_dir.mkdir(parents=True, exist_ok=True)
        self._listener = WorkerListener(socket_dir / "agent.sock")
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._run, name="worker-group", daemon=True)
        self._thread.start()

    @property
    def socket_path(self) -> Path:
        """The workers' socket; the group itself sets `ELASTIC_AGENT_SOCKET` for them."""
        return self._listener.path

    def warm(self) -> None:
        """Start the fork server if there is none; `ForkServerWarmed` or `ForkServerLost` follows.

        Must be called from the agent's main thread: the kernel ties the fork server's life to
        the thread that started it.

        Raises:
            RuntimeError: It was called from another thread.
            OSError: The system refuses the process.
        """
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("warm() was called from another thread than the main one: call it there")
        with self._lock:
            if self._server is not None or self._closing:
                return
            self._server = ServerProcess(
                self._spec.environment, directory=self._directory, log=self._log("fork-server")
            )
            self._server.set_up(
                entrypoint=self._spec.entrypoint,
                preload=self._spec.preload,
                start_method=self._spec.start_method,
                preflight=self._spec.preflight,
            )
            self._warming_since = self._clock.monotonic()
        self._notify()

    def start(self, environments: Sequence[Mapping[str, str]]) -> None:
        """Start one worker per local rank, each with its variables on top of the spec's.

        May be called before `ForkServerWarmed`: the workers then start right after it. The
        previous ones must have ended (`WorkersStopped`, or `WorkerExited` for each).

        Raises:
            ValueError: There are not as many environments as slots, or a worker still runs.
        """
        if len(environments) != self._spec.slots:
            raise ValueError(f"{len(environments)} environments for {self._spec.slots} slots: one each")
        with self._lock:
            for local_rank in range(self._spec.slots):
                self._check_free(local_rank)
            for local_rank, environment in enumerate(environments):
                self._launch(local_rank, environment)

    def replace(self, local_rank: int, environment: Mapping[str, str]) -> None:
        """Start the worker of one local rank anew.

        Raises:
            ValueError: The rank is out of range, or its worker still runs.
        """
        if not 0 <= local_rank < self._spec.slots:
            raise ValueError(f"local rank {local_rank} is not in 0..{self._spec.slots - 1}")
        with self._lock:
            self._check_free(local_rank)
            self._launch(local_rank, environment)

    def processes(self) -> dict[int, int]:
        """Return the process id of each local rank's worker that has started and not ended."""
        with self._lock:
            return {local_rank: worker.pid for local_rank, worker in self._workers.items() if worker.pid}

    def kill(self, local_rank: int, pid: int) -> None:
        """Kill a worker and everything in its session, if it still is that process."""
        with self._lock:
            worker = self._workers.get(local_rank)
            if worker is not None and worker.pid == pid and self._server is not None:
                self._server.kill_worker(worker.launch.number)
        self._notify()

    def send(self, message: AgentMessage) -> None:
        """Send a message to all workers that said `WorkerAttached`; never blocks."""
        with self._lock:
            self._listener.send(message, wanted=lambda number: self._rank_of(number) is not None)
        self._notify()

    def stop(self, grace_s: float) -> None:
        """End all workers: SIGTERM to their main processes only, after the grace SIGKILL to their sessions.

        Returns at once; `WorkersStopped` comes when none lives (also if none did). A second call
        can only shorten the grace; 0 kills at once. A worker that waits for the fork server to be
        warm is forgotten, without a `WorkerExited`.
        """
        with self._lock:
            if not self._is_warm():
                self._workers.clear()
            if self._server is not None and not self._stopping and grace_s > 0:
                for worker in self._workers.values():
                    self._server.signal(signal.SIGTERM, launch=worker.launch.number)
            self._stopping = True
            due = self._clock.monotonic() + grace_s
            if self._give_up_at is None and (self._kill_at is None or due < self._kill_at):
                self._kill_at = due
        self._notify()

    def close(self) -> None:
        """Kill everything, end the thread and remove the socket; no event comes after it.

        Must not be called from `events`.
        """
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._notify()
        self._thread.join()
        if self._server is not None:
            self._bury(self._server)
        self._listener.close()
        os.close(self._wake)
        os.close(self._woken)

    def log_tail(self, local_rank: int, lines: int = 20) -> str:
        """Return the last lines that a worker wrote, or "" where its output goes to the agent's."""
        path = self._log(f"worker-{local_rank}")
        return tail(path, lines) if path else ""

    # ---- with the lock held ------------------------------------------------------------------

    def _log(self, name: str) -> Path | None:
        return self._spec.log_dir.absolute() / f"{name}.log" if self._spec.log_dir else None

    def _is_warm(self) -> bool:
        return self._server is not None and self._server.warmed

    def _check_free(self, local_rank: int) -> None:
        if self._stopping or local_rank in self._workers:
            raise ValueError(f"the worker of local rank {local_rank} has not ended: wait for its exit")

    def _launch(self, local_rank: int, environment: Mapping[str, str]) -> None:
        number = next(self._numbers)
        log = self._log(f"worker-{local_rank}")
        own = {AGENT_SOCKET: str(self.socket_path), WORKER_LAUNCH: str(number)}
        defaults = {"LOCAL_RANK": str(local_rank), "OMP_NUM_THREADS": "1"}
        launch = Launch(
            number=number,
            local_rank=local_rank,
            entrypoint=self._spec.entrypoint,
            args=self._spec.args,
            environment={**defaults, **self._spec.environment, **environment, **own},
            directory=self._directory,
            log=str(log or ""),
        )
        self._workers[local_rank] = _Worker(launch)
        if self._server is not None and self._server.warmed:
            self._server.launch(launch)
            self._notify()

    def _rank_of(self, number: int | None) -> int | None:
        for local_rank, worker in self._workers.items():
            if worker.launch.number == number:
                return local_rank
        return None

    # ---- the group's thread ------------------------------------------------------------------

    def _notify(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self._woken, b"\0")

    def _run(self) -> None:
        while True:
            self._wait()
            with self._lock:
                if self._closing:
                    return
                events = self._advance()
            for event in events:
                self._events(event)

    def _wait(self) -> None:
        poll = select.poll()
        with self._lock:
            poll.register(self._wake, select.POLLIN)
            poll.register(self._listener, select.POLLIN)
            for peer in (*self._listener.peers, *([self._server.peer] if self._server else ())):
                poll.register(peer, select.POLLIN | (select.POLLOUT if peer.has_outgoing else 0))
            due = min(self._deadlines(), default=None)
            wait_s = None if due is None else max(0.0, due - self._clock.monotonic())
        poll.poll(None if wait_s is None else wait_s * 1000 + 1)

    def _deadlines(self) -> list[float]:
        found = [due for due in (self._kill_at, self._give_up_at) if due is not None]
        if self._server is not None and not self._server.warmed:
            found.append(self._warming_since + self._spec.warm_timeout_s)
        return found

    def _advance(self) -> list[WorkerEvent]:
        """Take in whatever came, and do what is due."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 12)
        server = self._server
        if server is not None:
            server.peer.flush()
        reports = server.reports() if server is not None else []
        events = self._hear_workers()  # after the reports: what a worker said comes before its exit
        if server is not None:
            for report in reports:
                events += self._hear_server(server, report)
            if server.peer.closed:
                events += self._lose_server(server)
        self._kill_if_due()
        if self._stopping and not self._workers:
            self._stopping = False
            self._kill_at = self._give_up_at = None
            events.append(WorkersStopped())
        return events

    def _hear_workers(self) -> list[WorkerEvent]:
        self._listener.accept()
        events: list[WorkerEvent] = []
        for peer in tuple(self._listener.peers):
            peer.flush()
            messages = peer.messages()
            local_rank = self._rank_of(peer.launch)
            if local_rank is not None:
                events += [WorkerSaid(local_rank=local_rank, message=message) for message in messages]
            if peer.closed:
                self._listener.drop(peer)
        return events

    def _hear_server(self, server: ServerProcess, report: dict[str, Any]) -> list[WorkerEvent]:
        if "warm" in report:
            server.warmed = True
            for worker in self._workers.values():
                server.launch(worker.launch)
            seconds = self._clock.monotonic() - self._warming_since
            return [ForkServerWarmed(seconds=seconds, notice=report["warm"])]
        if "started" in report:
            self._note_started(report["started"], report["pid"])
            return []
        if "refused" in report:
            return self._refused(report["refused"], report["reason"])
        return self._exited(report["exited"], report["pid"], report["code"])

    def _note_started(self, number: int, pid: int) -> None:
        local_rank = self._rank_of(number)
        if local_rank is not None:
            worker = self._workers[local_rank]
            worker.pid = pid
            with contextlib.suppress(ProcessLookupError):
                worker.process = os.pidfd_open(pid)

    def _refused(self, number: int, reason: str) -> list[WorkerEvent]:
        local_rank = self._rank_of(number)
        if local_rank is None:
            return []
        failure = Failure(
            node_id=NodeId(self._workers[local_rank].launch.environment.get("ELASTIC_NODE_ID", "")),
            generation=0,
            rank=-1,
            local_rank=local_rank,
            exit_code=START_REFUSED,
            message=reason,
            wall_time=self._clock.wall(),
        )
        said = WorkerSaid(local_rank=local_rank, message=WorkerFailed(failure=failure))
        return [said, *self._exited(number, 0, START_REFUSED)]

    def _exited(self, number: int, pid: int, code: int) -> list[WorkerEvent]:
        local_rank = self._rank_of(number)
        if local_rank is None:
            return []
        worker = self._workers.pop(local_rank)
        if worker.process >= 0:
            os.close(worker.process)
        return [WorkerExited(exit=WorkerExit(local_rank=local_rank, pid=pid, code=code))]

    def _kill_if_due(self) -> None:
        now = self._clock.monotonic()
        if self._server is None:
            return
        if not self._server.warmed:
            if now >= self._warming_since + self._spec.warm_timeout_s:
                self._server.kill(f"was not warm after {self._spec.warm_timeout_s:g} s")
        elif self._kill_at is not None and now >= self._kill_at:
            self._kill_at, self._give_up_at = None, now + _KILL_S
            for worker in self._workers.values():
                self._server.kill_worker(worker.launch.number)
        elif self._give_up_at is not None and now >= self._give_up_at:
            self._give_up_at = None
            self._server.kill(f"did not end its workers in {_KILL_S:g} s and was killed")

    def _lose_server(self, server: ServerProcess) -> list[WorkerEvent]:
        """Account for the end of the fork server: its workers die with it."""
        ending = self._bury(server)
        events = self._hear_workers()
        for worker in tuple(self._workers.values()):
            events += self._exited(worker.launch.number, worker.pid, -signal.SIGKILL)
        code = ExitCode.UNFIT if server.unfit else ExitCode.FAILED
        events.append(ForkServerLost(reason=server.unfit or f"the fork server {ending}", exit_code=code))
        return events

    def _bury(self, server: ServerProcess) -> str:
        """Make sure that the fork server and its workers are dead, and return how the server ended."""
        ending = server.end(_KILL_S + 1)
        for worker in self._workers.values():
            if worker.process >= 0:
                _await_end(worker.process)
        self._server = None
        return ending


def _await_end(process: int) -> None:
    """Kill a process whose parent has died, if the kernel has not done so, and wait for its end."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(process, signal.SIGKILL)
    poll = select.poll()
    poll.register(process, select.POLLIN)
    poll.poll(_KILL_S * 1000)
