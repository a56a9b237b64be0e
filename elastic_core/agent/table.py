"""The agent's transitions as data: one row an arrow, each with what it does and when it happens.

Rows of the same state and fact are tried in order; the first whose guard holds is
taken. `elastic_core.agent.core` runs the table and draws it. Facts that may come
late and then mean nothing are listed at the end: whatever is in neither is a bug.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from elastic_core.agent import actions as do
from elastic_core.agent.actions import Action
from elastic_core.agent.events import (
    AgentStarted,
    DrainRequested,
    ForceRequested,
    ForkServerDied,
    ForkServerReady,
    GenerationPublished,
    LeaseEnded,
    NodeUnfit,
    Registered,
    RunClosed,
    StopRequested,
    StoreSilent,
    TimeAdvanced,
    WorkerEnded,
    WorkerHung,
    WorkersStopped,
)
from elastic_core.agent.memory import AgentMemory
from elastic_core.model.messages import (
    GenerationLeft,
    GroupBroken,
    PaceChanged,
    ProgressMade,
    StepsResumed,
    TrainingFinished,
    WorkerAttached,
    WorkerFailed,
    WorkerReady,
)

Guard = Callable[[AgentMemory, Any, float], bool]


class AgentState(StrEnum):
    """Where an agent stands."""

    REGISTERING = "registering"
    """There is no record of this node (yet, or any more)."""
    WARMING = "warming"
    """Registered; the workers, or the fork server, are being set up."""
    STANDBY = "standby"
    """Can enter a generation at once; in none now."""
    TRAINING = "training"
    """The workers are in a generation."""
    STOPPING = "stopping"
    """Workers of the torchrun contract end; those of the newest generation follow."""
    FINISHED = "finished"
    """The workers ended well; the others may still train."""
    DRAINING = "draining"
    """Trains on until a generation without this node stands, or nobody takes over."""
    HALTING = "halting"
    """The whole run stops; the workers save and end."""
    STOPPED = "stopped"
    """The workers ended on request; the outcome is still to be written."""
    FENCED = "fenced"
    """The lease ended; the workers end before the node comes back under a new id."""
    LEAVING = "leaving"
    """The workers end for good; the exit code is decided."""
    ENDED = "ended"
    """The agent exits."""


S = AgentState


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One arrow: in `state`, on `fact` (an event or a worker's message), if `guard` holds."""

    state: AgentState
    fact: type
    next: AgentState
    action: Action
    guard: Guard | None
    when: str


def _row(
    state: AgentState, fact: type, to: AgentState, action: Action, when: str, *, guard: Guard | None = None
) -> Row:  # fmt: skip
    return Row(state=state, fact=fact, next=to, action=action, guard=guard, when=when)


# ---- guards ----------------------------------------------------------------------------------


def is_set_up(memory: AgentMemory, _event: object, _now: float) -> bool:
    """All workers, or the fork server, are set up."""
    return memory.is_set_up


def is_not_set_up(memory: AgentMemory, _event: object, _now: float) -> bool:
    """Workers cannot start now."""
    return not memory.is_set_up


def is_enlisted(memory: AgentMemory, _event: object, _now: float) -> bool:
    """The newest generation counts on this node."""
    return memory.is_enlisted


def is_enlisted_and_set_up(memory: AgentMemory, _event: object, _now: float) -> bool:
    """A generation was published with this node before it was set up (again)."""
    return memory.is_enlisted and memory.is_set_up


def is_enlisted_elastic(memory: AgentMemory, _event: object, _now: float) -> bool:
    """Workers that outlive generations are in the new one, too."""
    return memory.is_elastic and memory.is_enlisted


def is_newer(memory: AgentMemory, event: GenerationPublished, _now: float) -> bool:
    """A generation after the one acted on."""
    return event.generation.number > memory.generation


def is_newer_elastic(memory: AgentMemory, event: GenerationPublished, now: float) -> bool:
    """A generation after the one acted on, for workers that outlive generations."""
    return memory.is_elastic and is_newer(memory, event, now)


def is_elastic(memory: AgentMemory, _event: object, _now: float) -> bool:
    """Workers outlive generations."""
    return memory.is_elastic


def is_newly_broken(memory: AgentMemory, event: Any, _now: float) -> bool:
    """The current generation broke, and it was not reported yet."""
    number: int = event.message.generation
    return number == memory.generation and number > max(memory.broken, memory.failed)


def is_last_success(memory: AgentMemory, event: WorkerEnded, _now: float) -> bool:
    """The last worker ended well."""
    return event.code == 0 and len(memory.finished) == memory.policy.slots


def is_success(_memory: AgentMemory, event: WorkerEnded, _now: float) -> bool:
    """A worker ended well."""
    return event.code == 0


def is_doomed(memory: AgentMemory, event: WorkerEnded, _now: float) -> bool:
    """Its failure was reported before."""
    return event.local_rank in memory.doomed


def is_beyond_repair(memory: AgentMemory, event: WorkerEnded, _now: float) -> bool:
    """Set-up failed often, or it fails only here: others run a generation without this node."""
    is_outsider = memory.newest is not None and memory.generation == 0 and event.code >= 0
    return is_outsider or memory.failed_set_ups + 1 >= memory.policy.max_set_ups


def is_unable(memory: AgentMemory, _event: object, _now: float) -> bool:
    """The fork server died before it was warm."""
    return memory.failed_warmings > 0


def is_root(memory: AgentMemory, event: Any, now: float) -> bool:
    """The root cause comes after a consequence of it was reported."""
    reported = memory.reported
    if reported is None or not reported.consequence or getattr(event, "code", 1) == 0:
        return False
    return not memory.failure_of(event.local_rank, getattr(event, "code", 0), now).consequence


def is_last_end(memory: AgentMemory, _event: object, _now: float) -> bool:
    """The last worker ended by itself."""
    return not memory.alive and not memory.stopping


def is_out(memory: AgentMemory, _event: object, _now: float) -> bool:
    """All workers left the generation."""
    return memory.left >= memory.alive and not memory.stopping


def is_due(memory: AgentMemory, _event: object, now: float) -> bool:
    """The deadline is reached."""
    return memory.deadline is not None and now >= memory.deadline


# ---- rows ------------------------------------------------------------------------------------

_SET_UP: Final = (
    _row(S.REGISTERING, AgentStarted, S.REGISTERING, do.begin, "the agent begins"),
    _row(S.REGISTERING, Registered, S.STANDBY, do.get_ready, "set up while it registered", guard=is_set_up),
    _row(S.REGISTERING, Registered, S.WARMING, do.nothing, "the record stands"),
    _row(S.REGISTERING, WorkerEnded, S.LEAVING, do.give_up, "set-up fails for good", guard=is_beyond_repair),
    _row(S.REGISTERING, WorkerEnded, S.REGISTERING, do.retry_set_up, "set-up failed"),
    _row(
        S.WARMING, ForkServerReady, S.TRAINING, do.enter, "a generation waits", guard=is_enlisted_and_set_up
    ),
    _row(S.WARMING, ForkServerReady, S.STANDBY, do.get_ready, "workers can start", guard=is_set_up),
    _row(S.WARMING, ForkServerReady, S.WARMING, do.nothing, "workers start to set up"),
    _row(S.WARMING, WorkerReady, S.TRAINING, do.enter, "a generation waits", guard=is_enlisted_and_set_up),
    _row(S.WARMING, WorkerReady, S.STANDBY, do.get_ready, "the last worker is set up", guard=is_set_up),
    _row(S.WARMING, WorkerReady, S.WARMING, do.nothing, "a worker is set up"),
    _row(S.WARMING, WorkerEnded, S.WARMING, do.replace_failed, "a failed worker ended", guard=is_doomed),
    _row(S.WARMING, WorkerEnded, S.LEAVING, do.give_up, "set-up fails for good", guard=is_beyond_repair),
    _row(S.WARMING, WorkerEnded, S.WARMING, do.retry_set_up, "set-up failed"),
    _row(S.STANDBY, WorkerEnded, S.LEAVING, do.give_up, "set-up fails for good", guard=is_beyond_repair),
    _row(S.STANDBY, WorkerEnded, S.WARMING, do.retry_set_up, "an idle worker ended"),
)

_GENERATIONS: Final = (
    _row(S.STANDBY, GenerationPublished, S.TRAINING, do.enter, "it is a member", guard=is_enlisted),
    _row(S.STANDBY, GenerationPublished, S.STANDBY, do.say_standby, "there is no place for it"),
    _row(
        S.TRAINING, GenerationPublished, S.TRAINING, do.enter, "survivors go on", guard=is_enlisted_elastic
    ),
    _row(
        S.TRAINING, GenerationPublished, S.STANDBY, do.release, "it is a member no more",
        guard=is_newer_elastic,
    ),
    _row(
        S.TRAINING, GenerationPublished, S.STOPPING, do.stop_for_newer, "workers of one generation end",
        guard=is_newer,
    ),
    _row(
        S.STOPPING, WorkersStopped, S.WARMING, do.stop_being_ready, "there is no fork server now",
        guard=is_not_set_up,
    ),
    _row(S.STOPPING, WorkersStopped, S.TRAINING, do.enter, "the newest counts on it", guard=is_enlisted),
    _row(S.STOPPING, WorkersStopped, S.STANDBY, do.nothing, "there is none for it (yet)"),
    _row(S.TRAINING, WorkerEnded, S.FINISHED, do.finish, "the last one ended well", guard=is_last_success),
    _row(
        S.TRAINING, WorkerEnded, S.TRAINING, do.await_the_rest, "one of several ended well", guard=is_success
    ),
    _row(S.TRAINING, TimeAdvanced, S.STOPPING, do.fail_partial, "the rest does not end", guard=is_due),
    _row(S.FINISHED, LeaseEnded, S.FINISHED, do.keep_finished, "success must stay written"),
    _row(S.FINISHED, RunClosed, S.ENDED, do.exit_with_outcome, "the run is over"),
    _row(S.FINISHED, DrainRequested, S.ENDED, do.exit_finished, "nothing is left to do"),
)  # fmt: skip

_FAILURES: Final = (
    _row(S.TRAINING, GroupBroken, S.TRAINING, do.note_broken, "the collectives broke", guard=is_newly_broken),
    _row(S.TRAINING, GroupBroken, S.TRAINING, do.nothing, "known already, or of the past"),
    _row(S.TRAINING, WorkerFailed, S.WARMING, do.fail_and_await_end, "it says why it ends", guard=is_elastic),
    _row(S.TRAINING, WorkerFailed, S.STOPPING, do.fail_and_stop, "it says why it ends"),
    _row(S.TRAINING, WorkerEnded, S.WARMING, do.fail_and_replace, "a worker died", guard=is_elastic),
    _row(S.TRAINING, WorkerEnded, S.STOPPING, do.fail_and_stop, "a worker died"),
    *(
        _row(state, WorkerHung, state, do.kill_hung, "it does not come to the collective")
        for state in (S.TRAINING, S.DRAINING)
    ),
    _row(S.STOPPING, WorkerFailed, S.STOPPING, do.report_root, "the root cause", guard=is_root),
    _row(S.STOPPING, WorkerFailed, S.STOPPING, do.nothing, "a consequence"),
    _row(S.STOPPING, WorkerEnded, S.STOPPING, do.report_root, "the root cause", guard=is_root),
    _row(S.STOPPING, WorkerEnded, S.STOPPING, do.nothing, "ended as asked"),
)

_DRAIN: Final = (
    _row(S.TRAINING, DrainRequested, S.DRAINING, do.mark_draining, "a signal, a notice, the flow"),
    _row(
        S.DRAINING, GenerationPublished, S.DRAINING, do.enter_draining, "decided before the drain was known",
        guard=is_enlisted_elastic,
    ),
    _row(
        S.DRAINING, GenerationPublished, S.LEAVING, do.save_and_leave, "decided before the drain was known",
        guard=is_enlisted,
    ),
    _row(
        S.DRAINING, GenerationPublished, S.LEAVING, do.leave_released, "the others go on", guard=is_newer
    ),
    _row(S.DRAINING, TimeAdvanced, S.LEAVING, do.save_and_leave, "nobody takes over", guard=is_due),
    _row(S.DRAINING, WorkerEnded, S.LEAVING, do.leave_finished, "training ended", guard=is_last_success),
    _row(S.DRAINING, WorkerEnded, S.DRAINING, do.nothing, "one of several ended well", guard=is_success),
    _row(S.DRAINING, WorkerEnded, S.LEAVING, do.save_and_leave, "a worker died"),
    _row(S.DRAINING, WorkerFailed, S.LEAVING, do.save_and_leave, "a worker failed"),
    _row(
        S.DRAINING, GroupBroken, S.DRAINING, do.note_broken_draining, "the collectives broke",
        guard=is_newly_broken,
    ),
    _row(S.DRAINING, LeaseEnded, S.LEAVING, do.leave_fenced, "fenced meanwhile"),
    _row(S.STOPPING, DrainRequested, S.LEAVING, do.leave_stopping, "a signal, a notice, the flow"),
    _row(S.REGISTERING, DrainRequested, S.LEAVING, do.leave_unregistered, "a signal"),
    _row(S.FENCED, DrainRequested, S.LEAVING, do.stay_away, "a signal"),
    *(
        _row(state, DrainRequested, S.LEAVING, do.leave_idle, "a signal, a notice, the flow")
        for state in (S.WARMING, S.STANDBY)
    ),
)  # fmt: skip

_STOP: Final = (
    *(
        _row(state, StopRequested, S.HALTING, do.halt, "the run shall end")
        for state in (S.WARMING, S.STANDBY, S.TRAINING, S.STOPPING, S.DRAINING)
    ),
    _row(S.REGISTERING, StopRequested, S.LEAVING, do.leave_unregistered, "the run shall end"),
    _row(S.FENCED, StopRequested, S.LEAVING, do.stay_away, "the run shall end"),
    _row(S.HALTING, WorkersStopped, S.STOPPED, do.mark_stopped, "all workers ended"),
    _row(S.HALTING, LeaseEnded, S.LEAVING, do.leave_halted, "fenced meanwhile"),
    _row(S.STOPPED, RunClosed, S.ENDED, do.exit_with_outcome, "the outcome is written"),
    _row(S.STOPPED, TimeAdvanced, S.ENDED, do.exit_unanswered, "nobody writes the outcome", guard=is_due),
    _row(S.STOPPED, LeaseEnded, S.ENDED, do.exit_unanswered, "nobody will hear of it"),
    _row(S.STOPPED, DrainRequested, S.ENDED, do.exit_unanswered, "a signal"),
)

_FENCE: Final = (
    *(
        _row(state, LeaseEnded, S.FENCED, do.fence, "the store says so")
        for state in (S.WARMING, S.STANDBY, S.TRAINING, S.STOPPING)
    ),
    _row(S.FENCED, GenerationPublished, S.FENCED, do.kill, "others train on: no save counts", guard=is_newer),
    _row(S.FENCED, WorkersStopped, S.REGISTERING, do.re_register, "comes back as a new node"),
)

_ENDINGS: Final = (
    *(
        _row(state, RunClosed, S.LEAVING, do.obey_outcome, "the run is over")
        for state in (
            S.REGISTERING, S.WARMING, S.STANDBY, S.TRAINING, S.STOPPING, S.DRAINING, S.HALTING, S.FENCED,
        )
    ),
    *(
        row
        for state in (S.HALTING, S.FENCED, S.LEAVING)
        for row in (
            _row(state, WorkerEnded, state, do.kill, "the last one ended", guard=is_last_end),
            _row(state, TimeAdvanced, state, do.kill, "the grace is over", guard=is_due),
        )
    ),
    _row(S.LEAVING, GenerationLeft, S.LEAVING, do.stop_idle, "all left at the boundary", guard=is_out),
    _row(S.LEAVING, WorkersStopped, S.ENDED, do.exit_as_decided, "no worker lives"),
)  # fmt: skip

_ANY: Final = (
    _row(S.STANDBY, ForkServerDied, S.WARMING, do.lose_readiness, "it worked before"),
    *(
        row
        for state in (S.REGISTERING, S.WARMING, S.TRAINING, S.STOPPING)
        for row in (
            _row(state, ForkServerDied, S.LEAVING, do.give_up_server, "it cannot warm", guard=is_unable),
            _row(state, ForkServerDied, state, do.restart_server, "it worked before"),
        )
    ),
    *(
        _row(state, NodeUnfit, S.LEAVING, do.leave_unfit, "the program cannot be read here")
        for state in (S.REGISTERING, S.WARMING, S.STANDBY, S.TRAINING)
    ),
    *(
        _row(state, StoreSilent, S.LEAVING, do.leave_unheard, "nobody will say what to do")
        for state in (S.REGISTERING, S.WARMING, S.STANDBY, S.FINISHED, S.STOPPED)
    ),
    *(
        _row(state, fact, state, do.pass_on, "rank 0 tells")
        for state in (S.TRAINING, S.STOPPING, S.DRAINING, S.HALTING, S.LEAVING)
        for fact in (ProgressMade, StepsResumed, TrainingFinished)
    ),
    *(
        _row(state, PaceChanged, state, do.pass_on, "a worker is slower than the others, or is so no more")
        for state in (S.TRAINING, S.DRAINING)
    ),
    *(
        _row(state, ForceRequested, S.LEAVING, do.force, "a second signal")
        for state in AgentState
        if state is not S.ENDED
    ),
)

ROWS: Final[tuple[Row, ...]] = (
    *_SET_UP,
    *_GENERATIONS,
    *_FAILURES,
    *_DRAIN,
    *_STOP,
    *_FENCE,
    *_ENDINGS,
    *_ANY,
)

_LATE: Final[tuple[type, ...]] = (
    WorkerAttached, WorkerReady, GenerationLeft, GroupBroken, WorkerFailed, ProgressMade, StepsResumed,
    TrainingFinished, GenerationPublished, ForkServerReady, Registered, TimeAdvanced, StoreSilent,
    WorkerHung, PaceChanged,
)  # fmt: skip
"""May come in any state: a worker speaks while it is being ended, a timer was set for what is past."""
_UNIMPORTANT: Final[tuple[type, ...]] = (
    WorkerEnded, ForkServerDied, StopRequested, DrainRequested, LeaseEnded, NodeUnfit,
)  # fmt: skip
"""Change nothing for an agent whose way out is decided."""


def _ignored() -> Iterable[tuple[AgentState, type]]:
    for state in AgentState:
        yield from ((state, fact) for fact in _LATE)
    for state in (S.FINISHED, S.DRAINING, S.HALTING, S.STOPPED, S.FENCED, S.LEAVING, S.ENDED):
        yield from ((state, fact) for fact in _UNIMPORTANT)
    for state in (S.REGISTERING, S.FINISHED, S.STOPPED, S.ENDED):
        yield state, WorkersStopped
    yield S.REGISTERING, LeaseEnded  # of the id before
    yield S.STOPPING, NodeUnfit
    yield S.LEAVING, RunClosed  # it leaves for a reason of its own, or obeys already
    yield S.ENDED, RunClosed
    yield S.ENDED, ForceRequested


def _grouped() -> Mapping[tuple[AgentState, type], tuple[Row, ...]]:
    grouped: dict[tuple[AgentState, type], tuple[Row, ...]] = dict.fromkeys(_ignored(), ())
    for row in ROWS:
        grouped[row.state, row.fact] = (*grouped.get((row.state, row.fact), ()), row)
    return grouped


TABLE: Final = _grouped()
"""All pairs of state and fact that can be; without rows, or if no guard holds, nothing happens."""
