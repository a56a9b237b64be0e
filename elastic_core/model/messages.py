"""What an agent and its workers say to each other over their socket, one JSON object a line.

A worker of the torchrun contract says nothing; our runner speaks for it when it
ends. A worker of the elastic API (`elastic_core.trainer`) keeps its process over
generations: it is told of them, agrees with its peers on a step boundary, and
goes on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Cause, Generation
from elastic_core.model.progress import Progress, Resumption, RunResult, SlowWorker

# ---- worker to agent -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerAttached:
    """A worker of the elastic API connected; it has no rank yet."""

    local_rank: int
    pid: int
    kind: Literal["worker_attached"] = "worker_attached"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReady:
    """Set-up is done: the worker can enter a generation at once."""

    kind: Literal["worker_ready"] = "worker_ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupBroken:
    """A collective of this generation failed; the worker waits for the next one."""

    generation: int
    step: int
    error: str
    kind: Literal["group_broken"] = "group_broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLeft:
    """The worker left the generation at a step boundary (it was released, or asked to stop)."""

    generation: int
    step: int
    saved: bool
    kind: Literal["generation_left"] = "generation_left"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressMade:
    """Training went on (rank 0 sends it, at most ten times a second)."""

    progress: Progress
    kind: Literal["progress_made"] = "progress_made"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsResumed:
    """The first step of a generation is done (rank 0)."""

    resumption: Resumption
    kind: Literal["steps_resumed"] = "steps_resumed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceChanged:
    """The worker found itself slower than those of other nodes, or not any more."""

    slow: SlowWorker
    kind: Literal["pace_changed"] = "pace_changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFinished:
    """The job is complete (rank 0); the process ends with 0 soon after."""

    result: RunResult
    kind: Literal["training_finished"] = "training_finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFailed:
    """The user's code raised; the process ends soon after. Sent by the runner for any script.

    Attributes:
        printed: False if the worker left it to the agent to print the traceback, once for the run.
    """

    failure: Failure
    printed: bool = True
    kind: Literal["worker_failed"] = "worker_failed"


# ---- agent to worker -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class EnterGeneration:
    """A newer generation with this node in it: leave the old one at a boundary, form this one."""

    generation: Generation
    assignment: Assignment
    kind: Literal["enter_generation"] = "enter_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveGeneration:
    """A newer generation without this node: leave at a boundary and wait, set up, as a standby.

    Attributes:
        cause: The newer generation's. After a loss or failure the old group is given up at once.
    """

    generation: int
    cause: Cause = Cause.RESCALE
    kind: Literal["leave_generation"] = "leave_generation"


@dataclass(frozen=True, slots=True, kw_only=True)
class StopTraining:
    """End at the next step boundary; rank 0 writes a durable checkpoint first if `save`."""

    save: bool
    reason: str
    kind: Literal["stop_training"] = "stop_training"


WorkerMessage = Annotated[
    WorkerAttached
    | WorkerReady
    | GroupBroken
    | GenerationLeft
    | ProgressMade
    | StepsResumed
    | PaceChanged
    | TrainingFinished
    | WorkerFailed,
    Field(discriminator="kind"),
]
AgentMessage = Annotated[EnterGeneration | LeaveGeneration | StopTraining, Field(discriminator="kind")]

_WORKER: TypeAdapter[WorkerMessage] = TypeAdapter(WorkerMessage)
_AGENT: TypeAdapter[AgentMessage] = TypeAdapter(AgentMessage)


def decode_worker_message(line: bytes) -> WorkerMessage:
    """Parse a line that a worker wrote. Raises ValueError if it is none."""
    return _WORKER.validate_json(line)


def decode_agent_message(line: bytes) -> AgentMessage:
    """Parse a line that an agent wrote. Raises ValueError if it is none."""
    return _AGENT.validate_json(line)
