"""What an agent is told, and what it asks for.

Events are facts in past tense, commands are imperatives; both are frozen. What a
worker says arrives as the message itself, wrapped with the worker's local rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Closed, Generation
from elastic_core.model.messages import AgentMessage, WorkerMessage
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import Progress, Resumption, RunResult, SlowWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentPolicy:
    """What an agent's decisions depend on, in seconds where they are waits.

    Attributes:
        slots: Workers on this node.
        api: "torchrun": workers live for one generation; "elastic": they outlive generations.
        stop_grace: From the request to a worker to end until it is killed.
        close_grace: The same once the run is over: nobody waits for a save any more.
        release_timeout: A draining node that no new generation releases ends its workers after so long.
        outcome_timeout: A stopped node that nobody tells the outcome leaves after so long.
        max_set_ups: Set-ups of workers that may fail in a row.
        partial_exit: Once a worker of the torchrun contract ended well, its local peers may run so long.
    """

    slots: int
    api: Literal["torchrun", "elastic"]
    stop_grace: float = 30.0
    close_grace: float = 5.0
    release_timeout: float = 2.0
    outcome_timeout: float = 75.0
    max_set_ups: int = 3
    partial_exit: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """The part of a node's record that the agent decides; the driver knows the rest."""

    phase: NodePhase = NodePhase.WARMING
    generation: int = 0
    broken: int = 0
    failed: int = 0
    step: int = 0
    notice: str = ""


# ---- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStarted:
    """The run is open as far as is known, and the agent takes part. The first event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """The node's record stands in the store, on a lease that is being renewed."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseEnded:
    """The store said that the lease is over: this node is fenced."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerReady:
    """Workers can start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkServerDied:
    """The fork server died, and all workers with it; their ends were told before.

    Attributes:
        exit_code: What this node ends with if there is no other one.
    """

    reason: str
    exit_code: int = ExitCode.FAILED


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpoke:
    """A worker sent a message; what the machine's table knows is the message's type."""

    local_rank: int
    message: WorkerMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerEnded:
    """A worker's process ended; all that it said was told before.

    Attributes:
        code: The process's own exit code, or minus the signal that ended it.
        why: What the kernel says of a kill, "" if nothing.
    """

    local_rank: int
    code: int
    why: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerHung:
    """A worker does not come to the collective in which its peers wait, or was stopped by a signal.

    Attributes:
        pid: Of the process that was watched; another one may have taken its place.
        seconds: For how long it was watched without a change.
        step: Finished steps, -1 where the worker tells none.
        place: "file:line" where it stands, or "".
        stacks: Of all its threads, bounded, or "".
    """

    local_rank: int
    pid: int
    seconds: float
    step: int
    is_stopped: bool
    place: str
    stacks: str


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkersStopped:
    """What `StopWorkers` asked for is done: no worker lives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationPublished:
    """A generation is in force.

    Attributes:
        assignment: This node's part of it, None if it has none.
    """

    generation: Generation
    assignment: Assignment | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunClosed:
    """The run is over."""

    closed: Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The whole run shall end at the next step boundary, its state saved."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """This node shall leave: a signal, a notice of its provider, or the flow's wish.

    Attributes:
        notice: The provider's announcement, "" for every other reason.
        leave_by: Monotonic time by which the node must be out, None if it has all the time it needs.
    """

    reason: str
    notice: str = ""
    leave_by: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForceRequested:
    """This node shall leave now, whatever it costs: a second signal.

    Attributes:
        exit_code: What the agent ends with.
    """

    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeUnfit:
    """This node cannot run the workers, others may: the script is not readable here, for one."""

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSilent:
    """The store has not answered for as long as a run may wait for its nodes."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAdvanced:
    """A requested wake-up came; ticks that nobody asked for are harmless."""


AgentEvent = (
    AgentStarted
    | Registered
    | LeaseEnded
    | ForkServerReady
    | ForkServerDied
    | WorkerSpoke
    | WorkerEnded
    | WorkerHung
    | WorkersStopped
    | GenerationPublished
    | RunClosed
    | StopRequested
    | DrainRequested
    | ForceRequested
    | NodeUnfit
    | StoreSilent
    | TimeAdvanced
)

# ---- commands --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmForkServer:
    """Start the fork server; `ForkServerReady` or `ForkServerDied` follows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Register:
    """Take a lease and write the node's record; `Registered` follows.

    Attributes:
        renew: Under a new node id, which begins to hold now, so that workers started after this
            command bear it. A node whose training is over keeps its id.
    """

    status: NodeStatus
    renew: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Write the node's record; only the newest needs to arrive."""

    status: NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFailure:
    """Write a failure and the node's record, in one transaction."""

    failure: Failure
    status: NodeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteProgress:
    """Write where training is, at most once a second; only the newest needs to arrive."""

    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class WritePace:
    """Write that a worker is slower than the others, or is so no more."""

    slow: SlowWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResumption:
    """Write how a generation came to its first step."""

    resumption: Resumption


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteResult:
    """Write what training handed over."""

    result: RunResult


@dataclass(frozen=True, slots=True, kw_only=True)
class StartWorkers:
    """Start all workers, of a generation (torchrun API) or before any (elastic API)."""

    part: GenerationPublished | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaceWorker:
    """Start the worker of one local rank anew, before any generation."""

    local_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KillWorker:
    """Kill one worker, if it still is this process; `WorkerEnded` follows."""

    local_rank: int
    pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SendToWorkers:
    """Send a message to all workers."""

    message: AgentMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class StopWorkers:
    """End all workers; `WorkersStopped` follows, also if none lives. Again: only shortens the grace."""

    grace: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send `TimeAdvanced` at this monotonic time, instead of any wake-up asked for before."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Say:
    """Tell people, once, what is being done and why."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """Give up the lease, and end the agent."""

    code: int
    reason: str


AgentCommand = (
    WarmForkServer
    | Register
    | WriteStatus
    | ReportFailure
    | WriteProgress
    | WritePace
    | WriteResumption
    | WriteResult
    | StartWorkers
    | ReplaceWorker
    | KillWorker
    | SendToWorkers
    | StopWorkers
    | WakeAt
    | Say
    | Exit
)
