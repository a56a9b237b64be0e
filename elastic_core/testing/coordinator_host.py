"""The simulated node that leads: it delivers events, performs commands, keeps one timer, and dies."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.coordinator import Coordinator
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    CoordinatorEvent,
    CoordinatorPolicy,
    FenceNode,
    NodeAnswered,
    ProbeNodes,
    PublishGeneration,
    StoreView,
    TimeAdvanced,
    Wait,
    WakeAt,
)
from elastic_core.testing.invariants import InvariantViolated, Witness
from elastic_core.testing.simulated_store import CommitFault, SimulatedNode, SimulatedStore, Timing


class World(Protocol):
    """What a host needs of its simulator."""

    now: float
    store: SimulatedStore
    timing: Timing

    @property
    def nodes(self) -> Mapping[NodeId, SimulatedNode]:
        """Every node that ever was."""
        ...

    def after(self, delay: float, action: Callable[[], object]) -> None:
        """Let something happen later."""
        ...

    def flip(self, entry: HistoryEntry) -> None:
        """Write `current`."""
        ...

    def end_lease(self, node: SimulatedNode) -> None:
        """End a node's lease."""
        ...

    def is_down(self, node_id: NodeId) -> bool:
        """Whether a node does not answer."""
        ...


class CoordinatorHost:
    """Elects a node and drives its coordinator; a driver as simple as it can be.

    Attributes:
        leader: The node that holds the leader key.
        commit_faults: What happens to the next commits, first one first.
        lost_probes: Packets that the network loses next.
        handled: Events that coordinators took in.
        reason: What the coordinator said last.
        violation: What a coordinator did against the protocol; nothing after it means anything.
        wake_at: The wake-up it asked for and that has not come.
    """

    def __init__(
        self,
        world: World,
        policy: CoordinatorPolicy,
        build: Callable[[CoordinatorPolicy, StoreView, float], Coordinator],
    ) -> None:
        self.leader: NodeId | None = None
        self.commit_faults: deque[CommitFault] = deque()
        self.lost_probes = 0
        self.handled = 0
        self.reason = ""
        self.violation: InvariantViolated | None = None
        self.wake_at: float | None = None
        self._world = world
        self._policy = policy
        self._build = build
        self._coordinator: Coordinator | None = None
        self._witness: Witness | None = None
        self._term = 0
        self._seen = NO_REVISION
        self._is_electing = False
        self._backlog: list[CoordinatorEvent] = []

    def tick(self) -> None:
        """Ring the coordinator's timer although nobody asked for it."""
        self._deliver(TimeAdvanced())

    def elect(self) -> None:
        """Look for a leader if there is none."""
        if self.leader is None and not self._is_electing:
            self._is_electing = True
            self._world.after(self._world.timing.election, self._win)

    def forget(self) -> None:
        """All memory is lost; the next leader reads the store."""
        self._term += 1
        self.leader = None
        self.wake_at = None
        self._coordinator = None
        self._backlog = []
        self.elect()

    def thaw(self, node_id: NodeId) -> None:
        """The leader goes on with all that came in while it stood still, an overdue timer first."""
        if node_id == self.leader:
            events, self._backlog = self._backlog, []
            for event in sorted(events, key=lambda event: not isinstance(event, TimeAdvanced)):
                self._deliver(event)

    def tell(self, event: CoordinatorEvent) -> None:
        """Send on a change of the store, a little later, unless a view was read that has it already."""
        term, revision = self._term, self._world.store.revision
        self._world.after(self._world.timing.watch, lambda: self._tell_now(event, term, revision))

    def _tell_now(self, event: CoordinatorEvent, term: int, revision: Revision) -> None:
        if term == self._term and revision > self._seen:
            self._deliver(event)

    def _view(self) -> StoreView:
        self._seen = self._world.store.revision
        return self._world.store.view()

    def _win(self) -> None:
        self._is_electing = False
        world = self._world
        if self.leader is not None:
            return
        self.leader = next((node for node in world.store.nodes if not world.is_down(node)), None)
        if self.leader is None:
            if world.store.nodes:
                self.elect()
            return
        self._term += 1
        view = self._view()
        self._witness = Witness(
            self._policy,
            view,
            world.now,
            down_since=lambda node_id: world.nodes[node_id].down_since,
            up_since=lambda node_id: world.nodes[node_id].up_since,
        )
        self._coordinator = self._build(self._policy, view, world.now)
        self._deliver(TimeAdvanced())

    def _deliver(self, event: CoordinatorEvent) -> None:
        if self._coordinator is None or self._witness is None or self.leader is None:
            return
        if self._world.is_down(self.leader):
            self._backlog.append(event)
            return
        self.handled += 1
        self._witness.hear(event, self._world.now)
        for command in self._coordinator.handle(event, self._world.now):
            self._judge(self._witness, command)
            self._perform(command)

    def _judge(self, witness: Witness, command: CoordinatorCommand) -> None:
        try:
            witness.judge(command, self._world.now)
        except InvariantViolated as violation:
            self.violation = violation
            raise

    # ---- commands ----------------------------------------------------------------------------

    def _in_term(self, delay: float, action: Callable[[], object]) -> None:
        """Do something later, if this leader still leads then."""
        term = self._term
        self._world.after(delay, lambda: action() if term == self._term else None)

    def _perform(self, command: CoordinatorCommand) -> None:
        timing = self._world.timing
        match command:
            case PublishGeneration():
                self._in_term(timing.commit, lambda: self._commit(command))
            case CloseRun():
                self._in_term(timing.commit, lambda: self._close(command))
            case FenceNode(node_id=node_id):
                self._in_term(timing.commit, lambda: self._world.end_lease(self._world.nodes[node_id]))
            case ProbeNodes(nodes=nodes):
                for node_id in nodes:
                    self._probe(node_id)
            case WakeAt(at=at):
                self.wake_at = at
                self._in_term(max(at - self._world.now, 0.0), lambda: self._ring(at))
            case Wait(reason=reason):
                self.reason = reason

    def _ring(self, at: float) -> None:
        if self.wake_at == at:
            self.wake_at = None
            self._deliver(TimeAdvanced())

    def _probe(self, node_id: NodeId) -> None:
        if self.lost_probes:
            self.lost_probes -= 1
        elif not self._world.is_down(node_id):
            answer = NodeAnswered(node_id=node_id)
            self._in_term(self._world.timing.probe, lambda: self._deliver(answer))

    def _commit(self, command: PublishGeneration) -> None:
        fault = self.commit_faults.popleft() if self.commit_faults else None
        if fault is CommitFault.DIES_BEFORE:
            self.forget()
            return
        store = self._world.store
        happens = store.current_revision == command.based_on and fault is not CommitFault.REFUSED
        if happens:
            self._world.flip(command.entry)
        if fault is CommitFault.DIES_AFTER:
            self.forget()
        elif happens and fault is not CommitFault.UNANSWERED:
            self._deliver(CommitSucceeded(number=command.generation.number, revision=store.current_revision))
        else:
            self._deliver(CommitFailed(view=self._view()))

    def _close(self, command: CloseRun) -> None:
        fault = self.commit_faults.popleft() if self.commit_faults else None
        if fault is CommitFault.DIES_BEFORE:
            self.forget()
            return
        if fault is not CommitFault.REFUSED:
            self._world.store.closed = command.closed
            self._world.store.next_revision()
        if fault is CommitFault.DIES_AFTER:
            self.forget()
        elif fault is not None:
            self._deliver(CommitFailed(view=self._view()))
