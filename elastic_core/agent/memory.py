"""What an agent remembers: facts only, taken in one at a time; it decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from elastic_core.agent.events import (
    AgentEvent,
    AgentPolicy,
    DrainRequested,
    Exit,
    ForkServerDied,
    ForkServerReady,
    GenerationPublished,
    NodeStatus,
    WorkerEnded,
    WorkerHung,
    WorkerSpoke,
    WorkersStopped,
)
from elastic_core.exits import ExitCode, exit_code_of
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.messages import (
    GenerationLeft,
    GroupBroken,
    ProgressMade,
    StepsResumed,
    WorkerFailed,
    WorkerMessage,
    WorkerReady,
)
from elastic_core.model.node import NodePhase

SIGTERM = 15
SIGKILL = 9
_NAMES = {4: "ILL", 6: "ABRT", 7: "BUS", 8: "FPE", SIGKILL: "KILL", 11: "SEGV", SIGTERM: "TERM"}


@dataclass(slots=True)
class AgentMemory:
    """Everything that decisions of the agent depend on, beside its state.

    Attributes:
        warm: The fork server can start workers.
        failed_warmings: Fork servers in a row that died before they were warm.
        alive: Local ranks whose workers were started and have not ended.
        ready: Local ranks whose workers are set up (elastic API).
        finished: Local ranks whose workers ended well in this generation.
        left: Local ranks whose workers left the generation at a boundary.
        kills: What the kernel says of the last kill, by local rank.
        doomed: Local ranks whose failure was reported before their process ended.
        noted: Why workers fail, in their own words.
        newest: The newest generation that was published.
        part: The generation that the workers are in, None outside of any.
        generation: Number of the newest generation acted on.
        heard: Newest generation in which the workers proved to have trained.
        broken: Newest generation whose collectives broke.
        failed: Newest generation in which a worker failed.
        reported: The failure that was written down for this generation.
        step: Last finished step that any worker told, -1 before the first.
        failed_set_ups: Set-ups of workers that failed in a row.
        stopping: `StopWorkers` was asked for, and is not done.
        deadline: When workers that were asked to end are killed, or when a drain falls back.
        exit: What the agent ends with once no worker lives.
        notice: The provider's announcement that this machine goes, "" if there was none.
        leave_by: When this node must be out, None if it has all the time it needs.
    """

    policy: AgentPolicy
    node_id: NodeId = field(default=NodeId(""))
    warm: bool = False
    failed_warmings: int = 0
    alive: set[int] = field(default_factory=set)
    ready: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    left: set[int] = field(default_factory=set)
    kills: dict[int, str] = field(default_factory=dict)
    doomed: set[int] = field(default_factory=set)
    noted: dict[int, Failure] = field(default_factory=dict)
    newest: GenerationPublished | None = None
    part: GenerationPublished | None = None
    generation: int = 0
    heard: int = 0
    broken: int = 0
    failed: int = 0
    reported: Failure | None = None
    step: int = -1
    failed_set_ups: int = 0
    stopping: bool = False
    deadline: float | None = None
    exit: Exit | None = None
    notice: str = ""
    leave_by: float | None = None

    # ---- questions ---------------------------------------------------------------------------

    @property
    def is_elastic(self) -> bool:
        """Whether workers outlive generations."""
        return self.policy.api == "elastic"

    @property
    def is_set_up(self) -> bool:
        """Whether this node can enter a generation at once."""
        return len(self.ready) == self.policy.slots if self.is_elastic else self.warm

    @property
    def is_enlisted(self) -> bool:
        """Whether the newest generation counts on this node, and it has not acted on it yet."""
        newest = self.newest
        return (
            newest is not None
            and newest.assignment is not None
            and newest.generation.number > max(self.generation, self.failed)
        )

    @property
    def is_first(self) -> bool:
        """Whether rank 0 is on this node."""
        part = self.part
        return part is not None and part.assignment is not None and part.assignment.first_rank == 0

    def status(self, phase: NodePhase) -> NodeStatus:
        """Return what the node's record says in a phase."""
        return NodeStatus(
            phase=phase,
            generation=self.generation,
            broken=self.broken,
            failed=self.failed,
            step=max(self.step, 0),
            notice=self.notice,
        )

    def stop_grace(self, now: float) -> float:
        """Return the time that workers get to end: no more than the machine still has."""
        grace = self.policy.stop_grace
        return grace if self.leave_by is None else max(0.0, min(grace, self.leave_by - now))

    def failure_of(self, local_rank: int, code: int, now: float) -> Failure:
        """Return why a worker fails: in its own words, or from the code its process ended with.

        What ends without a word after we asked it to is a consequence; a kill before its grace was
        over is not ours.
        """
        noted = self.noted.get(local_rank)
        is_killed_by_us = code == -SIGKILL and self.deadline is not None and now >= self.deadline
        failure = noted or Failure(
            node_id=self.node_id,
            generation=0,
            rank=-1,
            local_rank=local_rank,
            exit_code=exit_code_of(code) or ExitCode.FAILED,
            message=self._ending(local_rank, code),
            started=code != 0,  # unknown where it said nothing; a restart may mend it
            consequence=self.stopping and (code in (-SIGTERM, 128 + SIGTERM) or is_killed_by_us),
        )
        assignment = self.part.assignment if self.part else None
        if failure.consequence and self.finished and not self.stopping:
            why = f"{self._finished_words()} before the others: {failure.message}"
            failure = replace(failure, consequence=False, message=why)
        return replace(
            failure,
            node_id=self.node_id,
            generation=self.part.generation.number if self.part else 0,
            rank=failure.rank if assignment is None else assignment.first_rank + local_rank,
            step=self.step if failure.step < 0 else failure.step,
        )

    def note_hang(self, event: WorkerHung) -> None:
        """Remember why a worker is about to be killed; its own words, if it said any, are better."""
        how = ", stopped by a signal" if event.is_stopped else ""
        hung = Failure(
            node_id=self.node_id,
            generation=0,
            rank=-1,
            local_rank=event.local_rank,
            exit_code=exit_code_of(-SIGKILL),
            message=f"hung{how}: no step for {event.seconds:.0f} s",
            location=event.place,
            traceback=event.stacks,
            step=event.step,
            started=True,
        )
        self.noted.setdefault(event.local_rank, hung)

    def note_partial_exit(self) -> int:
        """Remember that some workers ended well and the others never do; return the first of those."""
        local_rank = min(self.alive)
        message = f"{self._finished_words()}, this one still runs {self.policy.partial_exit:g} s later"
        self.noted[local_rank] = Failure(
            node_id=self.node_id,
            generation=0,
            rank=-1,
            local_rank=local_rank,
            exit_code=ExitCode.FAILED,
            message=message,
            started=True,
        )
        return local_rank

    def _finished_words(self) -> str:
        assignment = self.part.assignment if self.part else None
        first = assignment.first_rank if assignment else 0
        ranks = [str(first + local_rank) for local_rank in sorted(self.finished)]
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)} ended with code 0"

    def _ending(self, local_rank: int, code: int) -> str:
        if code < 0:
            name = _NAMES.get(-code)
            signal = f"signal {-code} (SIG{name})" if name else f"signal {-code}"
            why = self.kills.get(local_rank, "") or ("possibly out of memory" if code == -SIGKILL else "")
            return f"died by {signal}" + (f", {why}" if why else "")
        return f"ended with code {code}" if code else "ended before training began"

    # ---- facts -------------------------------------------------------------------------------

    def note(self, event: AgentEvent) -> None:
        """Take in a fact, whatever state the agent is in."""
        match event:
            case ForkServerReady():
                self.warm, self.failed_warmings = True, 0
            case ForkServerDied():
                self.failed_warmings += not self.warm
                self.warm = False
            case WorkerSpoke(local_rank=local_rank, message=message):
                self._hear(local_rank, message)
            case WorkerEnded(local_rank=local_rank, code=code, why=why):
                self.kills[local_rank] = why
                self.alive.discard(local_rank)
                self.ready.discard(local_rank)
                if code == 0:
                    self.finished.add(local_rank)
            case DrainRequested():
                self.notice = event.notice or self.notice
                self.leave_by = event.leave_by if self.leave_by is None else self.leave_by
            case WorkersStopped():
                self.stopping, self.deadline = False, None
                for group in (self.alive, self.ready, self.left, self.doomed):
                    group.clear()
            case GenerationPublished() if self.newest is None or (
                event.generation.number > self.newest.generation.number
            ):
                self.newest = event

    def _hear(self, local_rank: int, message: WorkerMessage) -> None:
        match message:
            case WorkerReady():
                self.ready.add(local_rank)
            case GroupBroken(step=step) | GenerationLeft(step=step):
                self.step = max(self.step, step)
            case ProgressMade(progress=progress):
                self.step = max(self.step, progress.step)
                self.heard = max(self.heard, progress.generation)
            case StepsResumed(resumption=resumption):
                self.heard = max(self.heard, resumption.generation)
            case WorkerFailed(failure=failure):
                self.noted[local_rank] = failure
        if isinstance(message, GenerationLeft):
            self.left.add(local_rank)

    def enter(self, part: GenerationPublished) -> None:
        """The workers are being told of a generation, or started for it."""
        self.part = part
        self.generation = part.generation.number
        self.reported = None
        self.noted.clear()
        self.left.clear()
        self.doomed.clear()
        if not self.is_elastic:
            self.finished.clear()

    def start_workers(self) -> None:
        """All workers are being started."""
        self.alive = set(range(self.policy.slots))
        for group in (self.ready, self.finished, self.left, self.doomed):
            group.clear()
        self.noted.clear()
