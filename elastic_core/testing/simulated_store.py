"""The simulated world's things: a store, nodes, and how long everything takes."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto

from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.events import StoreView


class CommitFault(Enum):
    """What goes wrong with the next commit."""

    REFUSED = auto()
    """It does not happen, and the coordinator is told so."""
    UNANSWERED = auto()
    """It happens, and the coordinator is told that it failed."""
    DIES_BEFORE = auto()
    """The coordinator's memory is lost before the commit."""
    DIES_AFTER = auto()
    """It is lost after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long things take in the simulated world, in seconds.

    Attributes:
        form: How long members wait for one that does not come before they call a generation broken.
    """

    ttl: float = 3.0
    ttl_jitter: float = 0.5
    watch: float = 0.002
    commit: float = 0.01
    probe: float = 0.01
    breaks: float = 0.002
    enter: float = 0.02
    set_up: float = 0.5
    form: float = 2.0
    suspect: float = 0.7
    election: float = 0.2
    leave: float = 0.05
    drain_patience: float = 2.0
    steps_per_s: float = 2.0


@dataclass(slots=True)
class SimulatedNode:
    """One machine with its agent.

    Attributes:
        down_since: When it was killed or frozen; None while it answers.
        up_since: When it last began to answer.
        is_dead: Killed for ever, as against frozen.
        has_failed_worker: A worker ended, and the agent has not said so yet.
    """

    record: NodeRecord
    joined: Revision
    up_since: float
    down_since: float | None = None
    is_dead: bool = False
    has_failed_worker: bool = False

    def is_unbroken(self, number: int) -> bool:
        """Whether its workers still run generation `number`, or never did."""
        is_well = max(self.record.broken, self.record.failed) < number and not self.has_failed_worker
        return is_well and self.record.phase in (NodePhase.READY, NodePhase.DRAINING)


@dataclass(slots=True)
class SimulatedStore:
    """What etcd would hold."""

    revision: Revision = NO_REVISION
    nodes: dict[NodeId, SimulatedNode] = field(default_factory=dict)
    entry: HistoryEntry | None = None
    current_revision: Revision = NO_REVISION
    failures: list[Failure] = field(default_factory=list)
    target: Target | None = None
    stop_reason: str | None = None
    closed: Closed | None = None

    def next_revision(self) -> Revision:
        """Count a write."""
        self.revision = Revision(self.revision + 1)
        return self.revision

    def view(self) -> StoreView:
        """Read everything at one revision."""
        return StoreView(
            nodes=tuple(node.record for node in self.nodes.values()),
            joined=tuple((node_id, node.joined) for node_id, node in self.nodes.items()),
            current=self.entry.generation if self.entry else None,
            current_revision=self.current_revision,
            history=self.entry,
            failures=tuple(self.failures),
            target=self.target,
            stop_reason=self.stop_reason,
            closed=self.closed,
        )
