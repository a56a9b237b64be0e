"""What an agent does on its transitions: each changes the memory and returns commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from elastic_core.agent.events import (
    AgentCommand,
    DrainRequested,
    Exit,
    ForceRequested,
    ForkServerDied,
    GenerationPublished,
    KillWorker,
    LeaseEnded,
    NodeStatus,
    NodeUnfit,
    Register,
    ReplaceWorker,
    ReportFailure,
    RunClosed,
    Say,
    SendToWorkers,
    StartWorkers,
    StopRequested,
    StopWorkers,
    StoreSilent,
    WakeAt,
    WarmForkServer,
    WorkerEnded,
    WorkerHung,
    WorkerSpoke,
    WritePace,
    WriteProgress,
    WriteResult,
    WriteResumption,
    WriteStatus,
)
from elastic_core.agent.memory import AgentMemory
from elastic_core.exits import ExitCode
from elastic_core.model.failure import Failure
from elastic_core.model.messages import (
    EnterGeneration,
    LeaveGeneration,
    PaceChanged,
    ProgressMade,
    StepsResumed,
    StopTraining,
    TrainingFinished,
)
from elastic_core.model.node import NodePhase

Commands = list[AgentCommand]
Action = Callable[[AgentMemory, Any, float], Commands]

IDLE_GRACE: Final = 1.0
"""For workers that hold nothing worth saving: set up, but in no generation."""


def nothing(_memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Only take note."""
    return []


# ---- set-up ----------------------------------------------------------------------------------


def begin(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Register and set up at the same time; whichever is last makes the node ready."""
    register = Register(status=memory.status(NodePhase.WARMING), renew=True)
    return [register, WarmForkServer(), *_start_before_generations(memory)]


def re_register(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Come back as a new member after the fence."""
    memory.newest = memory.part = memory.reported = memory.deadline = None
    memory.generation = memory.broken = memory.failed = memory.failed_set_ups = 0
    register = Register(status=memory.status(NodePhase.WARMING), renew=True)
    return [register, *_start_before_generations(memory)]


def get_ready(memory: AgentMemory, _event: object, now: float) -> Commands:
    """Say that this node can enter a generation."""
    ready: Commands = [WriteStatus(status=memory.status(NodePhase.READY))]
    return ready if memory.newest is None else [*ready, *say_standby(memory, memory.newest, now)]


def restart_server(_memory: AgentMemory, event: ForkServerDied, _now: float) -> Commands:
    """Replace a fork server that worked before."""
    return [Say(text=f"{event.reason}; starting another"), WarmForkServer()]


def lose_readiness(memory: AgentMemory, event: ForkServerDied, now: float) -> Commands:
    """A node must not be waited for while it cannot start workers."""
    return [*restart_server(memory, event, now), *stop_being_ready(memory, event, now)]


def stop_being_ready(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Say that workers cannot start here now."""
    return [WriteStatus(status=memory.status(NodePhase.WARMING))]


def give_up_server(memory: AgentMemory, event: ForkServerDied, now: float) -> Commands:
    """A fork server that cannot become warm will not become so by repetition."""
    return _leave(memory, event.exit_code, f"workers cannot be started here: {event.reason}", now)


def replace_failed(memory: AgentMemory, event: WorkerEnded, _now: float) -> Commands:
    """The process of a failure that was reported before has ended."""
    memory.doomed.discard(event.local_rank)
    memory.noted.pop(event.local_rank, None)
    memory.alive.add(event.local_rank)
    return [ReplaceWorker(local_rank=event.local_rank), *_replace_finished(memory)]


def retry_set_up(memory: AgentMemory, event: WorkerEnded, now: float) -> Commands:
    """Try the set-up of a worker again; before the first generation the coordinator decides, too."""
    failure = memory.failure_of(event.local_rank, event.code, now)
    memory.failed_set_ups += 1
    memory.alive.add(event.local_rank)
    memory.noted.pop(event.local_rank, None)
    commands: Commands = [Say(text=f"set-up failed, trying again: {failure.headline()}")]
    if memory.newest is None:
        commands.append(ReportFailure(failure=failure, status=memory.status(NodePhase.WARMING)))
    else:
        commands.append(WriteStatus(status=memory.status(NodePhase.WARMING)))
    return [*commands, ReplaceWorker(local_rank=event.local_rank)]


def give_up(memory: AgentMemory, event: WorkerEnded, now: float) -> Commands:
    """Set-up fails here and works elsewhere, or fails again and again: end only this node."""
    failure = memory.failure_of(event.local_rank, event.code, now)
    return _leave(memory, failure.exit_code, f"set-up of workers failed: {failure.headline()}", now)


# ---- generations -----------------------------------------------------------------------------


def enter(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Act on the newest generation."""
    return _enter(memory, NodePhase.READY)


def enter_draining(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Help a generation form that was decided before the drain was known, so that none waits in vain."""
    return _enter(memory, NodePhase.DRAINING)


def say_standby(memory: AgentMemory, event: GenerationPublished, _now: float) -> Commands:
    """Stay ready beside a generation that does not have this node."""
    if memory.newest is not event or event.assignment is not None:
        return []
    return [Say(text=f"standby: {_describe(event)} trains without this node")]


def release(memory: AgentMemory, event: GenerationPublished, _now: float) -> Commands:
    """The workers leave at a boundary and stay set up."""
    memory.part = None
    number = memory.generation = event.generation.number
    said = Say(text=f"standby: released by {_describe(event)}")
    leave = LeaveGeneration(generation=number, cause=event.generation.cause)
    return [SendToWorkers(message=leave), said]


def stop_for_newer(memory: AgentMemory, event: GenerationPublished, now: float) -> Commands:
    """Workers of the torchrun contract end with their generation."""
    said = Say(text=f"ending the workers of generation {memory.generation} for {_describe(event)}")
    return [said, *_stop(memory, memory.policy.stop_grace, now)]


def note_broken(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Report at once that the collectives broke: the coordinator acts on the first report."""
    memory.broken = memory.generation
    return [WriteStatus(status=memory.status(NodePhase.READY))]


def note_broken_draining(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """The same while this node leaves anyhow."""
    memory.broken = memory.generation
    return [WriteStatus(status=memory.status(NodePhase.DRAINING))]


def pass_on(memory: AgentMemory, event: WorkerSpoke, _now: float) -> Commands:
    """What rank 0 tells of the run goes to the store; what other ranks tell, their agent remembers.

    Any worker may be the slow one; what is done about it is the flow's to decide.
    """
    if isinstance(event.message, PaceChanged):
        return [Say(text=event.message.slow.headline()), WritePace(slow=event.message.slow)]
    if not memory.is_first or event.local_rank:
        return []
    match event.message:
        case ProgressMade(progress=progress):
            return [WriteProgress(progress=progress)]
        case StepsResumed(resumption=resumption):
            return [WriteResumption(resumption=resumption)]
        case TrainingFinished(result=result):
            return [WriteResult(result=result)]
    return []


def finish(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """All workers ended well."""
    return [WriteStatus(status=_succeeded(memory)), Say(text="workers finished, waiting for the others")]


def await_the_rest(memory: AgentMemory, _event: WorkerEnded, now: float) -> Commands:
    """A worker ended well before its local peers: under the torchrun contract they may take their time.

    Those of the elastic API end together, or their collectives break.
    """
    if memory.is_elastic or memory.deadline is not None:
        return []
    memory.deadline = now + memory.policy.partial_exit
    return [WakeAt(at=memory.deadline)]


def fail_partial(memory: AgentMemory, _event: object, now: float) -> Commands:
    """The others do not end: that is a failure of those."""
    memory.deadline = None
    report = _report(memory, memory.note_partial_exit(), 1, now)
    return [*report, *_stop(memory, memory.policy.stop_grace, now)]


def keep_finished(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """No worker is left that a fence could stop: only the word of success must stand again."""
    return [Register(status=_succeeded(memory), renew=False)]


# ---- failures --------------------------------------------------------------------------------


def fail_and_replace(memory: AgentMemory, event: WorkerEnded, now: float) -> Commands:
    """Report a failed worker of the elastic API and set another one up beside its peers."""
    report = _report(memory, event.local_rank, event.code, now)
    memory.noted.pop(event.local_rank, None)
    memory.alive.add(event.local_rank)
    return [*report, ReplaceWorker(local_rank=event.local_rank), *_replace_finished(memory)]


def fail_and_await_end(memory: AgentMemory, event: WorkerSpoke, now: float) -> Commands:
    """Report what a worker said of its failure before its process has ended."""
    memory.doomed.add(event.local_rank)
    memory.ready.discard(event.local_rank)
    return _report(memory, event.local_rank, 0, now)


def fail_and_stop(memory: AgentMemory, event: WorkerSpoke | WorkerEnded, now: float) -> Commands:
    """Report a failed worker of the torchrun contract and end the others."""
    code = event.code if isinstance(event, WorkerEnded) else 0
    report = _report(memory, event.local_rank, code, now)
    return [*report, *_stop(memory, memory.policy.stop_grace, now)]


def kill_hung(memory: AgentMemory, event: WorkerHung, now: float) -> Commands:
    """End a worker that will not come: its death frees its peers, and is told as what it is."""
    memory.note_hang(event)
    told = memory.failure_of(event.local_rank, -9, now)
    return [
        Say(text=f"{told.headline()}; its stacks:\n{event.stacks or 'none, it does not answer'}"),
        KillWorker(local_rank=event.local_rank, pid=event.pid),
    ]


def report_root(memory: AgentMemory, event: WorkerSpoke | WorkerEnded, now: float) -> Commands:
    """Replace a reported consequence by the root cause, which was told later."""
    code = event.code if isinstance(event, WorkerEnded) else 0
    return _report(memory, event.local_rank, code, now)


# ---- leaving ---------------------------------------------------------------------------------


def mark_draining(memory: AgentMemory, event: DrainRequested, now: float) -> Commands:
    """Ask for a generation without this node, and train until it is there."""
    memory.exit = Exit(code=ExitCode.PREEMPTED, reason=f"drained: {event.reason}")
    memory.deadline = now + min(memory.policy.release_timeout, memory.stop_grace(now) / 2)
    return [
        Say(text=f"draining: {event.reason}"),
        WriteStatus(status=memory.status(NodePhase.DRAINING)),
        WakeAt(at=memory.deadline),
    ]


def leave_released(memory: AgentMemory, event: GenerationPublished, now: float) -> Commands:
    """The others go on without this node; its workers leave at the boundary."""
    said = Say(text=f"leaving: {_describe(event)} goes on without this node")
    memory.deadline = None
    if not memory.is_elastic:
        return [said, *_stop(memory, memory.stop_grace(now), now)]
    memory.deadline = now + memory.stop_grace(now)
    newer = event.generation
    leave = LeaveGeneration(generation=newer.number, cause=newer.cause)
    return [said, SendToWorkers(message=leave), WakeAt(at=memory.deadline)]


def save_and_leave(memory: AgentMemory, _event: object, now: float) -> Commands:
    """Nobody takes over: save and go."""
    said = Say(text="no generation goes on without this node: saving and leaving")
    return [said, *_end_gently(memory, "the node is drained", now)]


def leave_idle(memory: AgentMemory, event: DrainRequested | StopRequested, now: float) -> Commands:
    """Leave while nothing is being trained here."""
    return [
        WriteStatus(status=memory.status(NodePhase.DRAINING)),
        *_leave(memory, ExitCode.PREEMPTED, f"drained: {event.reason}", now),
    ]


def leave_unregistered(memory: AgentMemory, event: DrainRequested | StopRequested, now: float) -> Commands:
    """Leave before there is a record of this node."""
    return _leave(memory, ExitCode.PREEMPTED, f"stopped: {event.reason}", now)


def stay_away(memory: AgentMemory, event: DrainRequested | StopRequested, _now: float) -> Commands:
    """The fenced workers are ending already: do not come back afterwards."""
    memory.exit = Exit(code=ExitCode.PREEMPTED, reason=f"stopped: {event.reason}")
    return []


def leave_stopping(memory: AgentMemory, event: DrainRequested, _now: float) -> Commands:
    """The workers are ending already: leave afterwards."""
    memory.exit = Exit(code=ExitCode.PREEMPTED, reason=f"drained: {event.reason}")
    return [WriteStatus(status=memory.status(NodePhase.DRAINING))]


def leave_finished(memory: AgentMemory, _event: object, now: float) -> Commands:
    """Training ended before the drain was over."""
    memory.exit = Exit(code=ExitCode.OK, reason="drained after its workers finished")
    return [WriteStatus(status=_succeeded(memory)), *_stop(memory, 0, now)]


def leave_unfit(memory: AgentMemory, event: NodeUnfit, now: float) -> Commands:
    """End this node by its own error; the others go on."""
    return _leave(memory, ExitCode.FAILED, event.reason, now)


def leave_unheard(memory: AgentMemory, event: StoreSilent, now: float) -> Commands:
    """Nobody will ever say what to do: end, rather than wait and cost money for ever."""
    is_done = memory.policy.slots == len(memory.finished)
    reason = f"the store did not answer for {event.seconds:.0f} s"
    return _leave(memory, ExitCode.OK if is_done else ExitCode.BELOW_MINIMUM, reason, now)


def leave_fenced(memory: AgentMemory, _event: LeaseEnded, now: float) -> Commands:
    """The lease ended while this node waited to be released: nobody will release it now."""
    return _end_gently(memory, "the node's lease ended", now)


def leave_halted(memory: AgentMemory, _event: LeaseEnded, _now: float) -> Commands:
    """The lease ended while the workers were ending on request."""
    memory.exit = Exit(code=ExitCode.PREEMPTED, reason="stopped; the lease ended meanwhile")
    return []


def obey_outcome(memory: AgentMemory, event: RunClosed, now: float) -> Commands:
    """The run is over: end what still runs, and end with its code."""
    memory.exit = Exit(code=event.closed.exit_code, reason=event.closed.reason)
    return _stop(memory, memory.policy.close_grace, now)


def force(memory: AgentMemory, event: ForceRequested, now: float) -> Commands:
    """Kill and go."""
    memory.exit = Exit(code=event.exit_code, reason=event.reason)
    return _stop(memory, 0, now)


def halt(memory: AgentMemory, event: StopRequested, now: float) -> Commands:
    """The whole run stops: end at the boundary, saved, then wait for the outcome."""
    return [Say(text=f"stopping: {event.reason}"), *_end_gently(memory, event.reason, now)]


def mark_stopped(memory: AgentMemory, _event: object, now: float) -> Commands:
    """Say that this node takes no part any more; it stays to coordinate, and for the outcome."""
    memory.part = None
    memory.generation = 0
    memory.deadline = now + memory.policy.outcome_timeout
    return [WriteStatus(status=memory.status(NodePhase.DRAINING)), WakeAt(at=memory.deadline)]


def exit_unanswered(_memory: AgentMemory, _event: object, _now: float) -> Commands:
    """Nobody is there to close the run; it is resumable all the same."""
    return [Exit(code=ExitCode.PREEMPTED, reason="stopped; nobody closed the run")]


def exit_with_outcome(_memory: AgentMemory, event: RunClosed, _now: float) -> Commands:
    """End as the run did."""
    return [Exit(code=event.closed.exit_code, reason=event.closed.reason)]


def exit_finished(_memory: AgentMemory, event: DrainRequested, _now: float) -> Commands:
    """Leave when there is nothing left to do here."""
    return [Exit(code=ExitCode.OK, reason=f"drained after its workers finished: {event.reason}")]


def exit_as_decided(memory: AgentMemory, _event: object, _now: float) -> Commands:
    """No worker lives: go."""
    assert memory.exit is not None, "every row into LEAVING decides it"
    return [memory.exit]


# ---- fencing and endings ---------------------------------------------------------------------


def fence(memory: AgentMemory, _event: object, now: float) -> Commands:
    """Stop the workers before anything else. They may save: checkpoints are fenced by generation."""
    said = Say(text="the lease ended: this node is fenced, its workers are stopped before it comes back")
    return [said, *_end_gently(memory, "the node's lease ended", now)]


def kill(memory: AgentMemory, _event: object, now: float) -> Commands:
    """No worker is worth waiting for any more."""
    return _stop(memory, 0, now)


def stop_idle(memory: AgentMemory, _event: object, now: float) -> Commands:
    """The workers left the generation: they have nothing to save."""
    return _stop(memory, IDLE_GRACE, now)


# ---- parts -----------------------------------------------------------------------------------


def _start_before_generations(memory: AgentMemory) -> Commands:
    if not memory.is_elastic:
        return []
    memory.start_workers()
    return [StartWorkers()]


def _enter(memory: AgentMemory, phase: NodePhase) -> Commands:
    part = memory.newest
    assert part is not None, "the table's guards see to it"
    assert part.assignment is not None
    memory.enter(part)
    memory.failed_set_ups = 0
    ranks = f"ranks {part.assignment.first_rank}..{part.assignment.first_rank + part.assignment.slots - 1}"
    said = Say(text=f"entering {_describe(part)}, {ranks} of {part.generation.world_size}")
    status = WriteStatus(status=memory.status(phase))
    if memory.is_elastic:
        message = EnterGeneration(generation=part.generation, assignment=part.assignment)
        return [SendToWorkers(message=message), status, said]
    memory.start_workers()
    memory.deadline = None
    return [StartWorkers(part=part), status, said]


def _replace_finished(memory: AgentMemory) -> Commands:
    """Set up again what ended well in a generation that failed: the next one needs all local ranks."""
    ranks = sorted(memory.finished)
    memory.finished.clear()
    memory.alive.update(ranks)
    return [ReplaceWorker(local_rank=rank) for rank in ranks]


def _report(memory: AgentMemory, local_rank: int, code: int, now: float) -> Commands:
    failure: Failure = memory.failure_of(local_rank, code, now)
    memory.reported = failure
    memory.failed = failure.generation
    phase = NodePhase.WARMING if memory.is_elastic else NodePhase.READY
    return [
        ReportFailure(failure=failure, status=memory.status(phase)),
        Say(text=f"failed in generation {failure.generation}: {failure.headline()}"),
    ]


def _succeeded(memory: AgentMemory) -> NodeStatus:
    """Return the status of success, in the generation in which rank 0 really trained last."""
    if memory.is_first and memory.heard:
        memory.generation = memory.heard
    return memory.status(NodePhase.SUCCEEDED)


def _leave(memory: AgentMemory, code: int, reason: str, now: float) -> Commands:
    memory.exit = Exit(code=code, reason=reason)
    return _stop(memory, IDLE_GRACE, now)


def _end_gently(memory: AgentMemory, why: str, now: float) -> Commands:
    """Let workers that train save at a boundary; those that do not train just end."""
    memory.deadline = None
    if memory.part is None or not memory.alive:
        return _stop(memory, IDLE_GRACE, now)
    if not memory.is_elastic or memory.stopping:
        return _stop(memory, memory.stop_grace(now), now)
    memory.deadline = now + memory.stop_grace(now)
    return [SendToWorkers(message=StopTraining(save=True, reason=why)), WakeAt(at=memory.deadline)]


def _stop(memory: AgentMemory, grace: float, now: float) -> Commands:
    memory.stopping = True
    memory.deadline = now + grace if memory.deadline is None else min(memory.deadline, now + grace)
    return [StopWorkers(grace=grace)]


def _describe(event: GenerationPublished) -> str:
    generation = event.generation
    return f"generation {generation.number} ({generation.cause}: {generation.reason})"
