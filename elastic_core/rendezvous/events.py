"""What the coordinator is told, and what it asks for.

Events are facts in past tense, commands are imperatives; both are frozen.
Commands that write carry what they are based on, and their outcome comes back
as an event: succeeded, conflicted or unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from elastic_core.ids import NO_REVISION, LeaseId, NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Closed, Generation, Target
from elastic_core.model.node import NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.model.sizes import ALL_SIZES, AllowedSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPolicy:
    """The bounds and waits of a run, in seconds, from `JobSpec` or torchrun's flags."""

    min_nodes: int
    max_nodes: int
    last_call: float
    join_timeout: float
    probe_timeout: float
    max_restarts: int
    no_progress_limit: int = 3
    """Failed generations in a row without a new step that end the run."""
    stop_timeout: float = 60.0
    """A stop that some member does not follow closes the run after so long."""
    partial_exit: float = 3600.0
    """Once a member finished, the others may take so long to."""
    changes_per_hour: int = 0
    """Joins, losses and drains within an hour beyond which the run ends; 0: as many as come."""
    sizes: AllowedSizes = ALL_SIZES
    """Numbers of nodes that a generation may have, within the bounds."""

    @property
    def least(self) -> int:
        """Members that a generation has at least."""
        return self.sizes.least_from(self.min_nodes)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreView:
    """All that the store knows of a run when a coordinator takes over, read at one revision.

    Attributes:
        joined: Creation revision of each node's key.
        current_revision: Revision of the last write of `current`, 0 if there is none.
        history: The current generation's entry; its members are the current members.
        failures: Those of the current generation (of generation 0 before the first) at least, in
            the order of their keys' creation; others are ignored.
    """

    nodes: tuple[NodeRecord, ...] = ()
    joined: tuple[tuple[NodeId, Revision], ...] = ()
    current: Generation | None = None
    current_revision: Revision = NO_REVISION
    history: HistoryEntry | None = None
    failures: tuple[Failure, ...] = ()
    target: Target | None = None
    stop_reason: str | None = None
    closed: Closed | None = None


# ---- events ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSeen:
    """A node's record was written: it joined, or its phase, generation or reports changed.

    Attributes:
        joined: Store revision at which the node's key was created: the order of arrival.
    """

    record: NodeRecord
    joined: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone:
    """A node's key is gone: its lease ended, was revoked, or the node left."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeAnswered:
    """A probed node answered."""

    node_id: NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetChanged:
    """The flow wants another number of nodes."""

    target: Target | None


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The run shall end at the next step boundary, its state saved.

    The run is closed when every member has left: its key is gone, or its record says so
    (`WARMING`, `SUCCEEDED`, or `DRAINING` with generation 0: the mark of an agent whose workers
    ended on request and that stays only to coordinate).
    """

    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureReported:
    """A node wrote down why its workers failed (in the transaction that sets its `failed`).

    Arrival order is the store's order; the first that is no consequence is the root cause. A
    failure that never formed a group (`started` is false) and is an exception, not a signal,
    cannot be mended by a restart.
    """

    failure: Failure


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitSucceeded:
    """The commanded generation is `current` now."""

    number: int
    revision: Revision


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitFailed:
    """The store refused or gave no answer; the driver read the truth again.

    Attributes:
        view: The store's state after the failed commit. If this node no longer leads, the driver
            drops the coordinator instead of sending this event. Watch events older than the view
            must not be delivered after it. It is also the answer to a `CloseRun` that failed, and
            may be sent unasked to replace all that the coordinator knows (after a broken watch).
    """

    view: StoreView


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeAdvanced:
    """A requested wake-up came, or the coordinator was just built: its first decision is due.

    Ticks that nobody asked for are harmless.
    """


CoordinatorEvent = (
    NodeSeen
    | NodeGone
    | NodeAnswered
    | TargetChanged
    | StopRequested
    | FailureReported
    | CommitSucceeded
    | CommitFailed
    | TimeAdvanced
)

# ---- commands --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishGeneration:
    """Write the assignments, then flip `current` and add the history entry, fenced.

    The prefix of the generation's assignments is deleted first: a coordinator that died between
    its assignments and `current` may have left others under the same number. Exactly one of
    `CommitSucceeded` and `CommitFailed` answers; nothing else is decided before.

    Attributes:
        entry: Its times are on the clock of `now`; the driver turns them into wall-clock time.
        based_on: Revision of `current` that this replaces, 0 for none.
    """

    entry: HistoryEntry
    assignments: tuple[Assignment, ...]
    based_on: Revision

    @property
    def generation(self) -> Generation:
        """The generation to publish."""
        return self.entry.generation


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeNodes:
    """Ask these nodes once for a sign of life now; each answer comes back as `NodeAnswered`.

    The coordinator asks again those that are silent, so one lost packet evicts nobody.
    """

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FenceNode:
    """Revoke a silent node's lease; its key's end comes back as `NodeGone`.

    Asked again every second until then: an attempt that failed needs no answer.
    """

    node_id: NodeId
    lease: LeaseId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseRun:
    """Write the outcome, fenced by the leader key; agents end by it.

    Nothing is decided after it, unless `CommitFailed` says that it was not written.
    """

    closed: Closed


@dataclass(frozen=True, slots=True, kw_only=True)
class WakeAt:
    """Send `TimeAdvanced` at this monotonic time, instead of any wake-up asked for before."""

    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """Nothing to do; said when the reason changes, so that silence is never a mystery."""

    reason: str
    facts: tuple[tuple[str, str], ...] = field(default=())


CoordinatorCommand = PublishGeneration | ProbeNodes | FenceNode | CloseRun | WakeAt | Wait
