"""A whole run without a machine: one coordinator, thousands of nodes, an hour in seconds.

Everything happens in one queue of (time, order); the same seed gives the same run, event
for event. Nodes are killed, frozen and drained, workers fail, commits are refused or happen
unanswered, coordinators die after any write; `Witness` checks each command on the way.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Target
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.coordinator import Coordinator
from elastic_core.rendezvous.events import (
    CoordinatorPolicy,
    FailureReported,
    NodeGone,
    NodeSeen,
    StopRequested,
    StoreView,
    TargetChanged,
)
from elastic_core.testing.coordinator_host import CoordinatorHost
from elastic_core.testing.scenario import make_record
from elastic_core.testing.simulated_store import SimulatedNode, SimulatedStore, Timing


class Simulator:
    """One simulated run.

    Args:
        build: Makes a coordinator; a test may plant a bug here.
        elastic: Whether a node must set itself up again after a worker failed.

    Attributes:
        now: Simulated seconds.
        host: The node that leads, with its coordinator.
        members: Members of the current generation, by rank (the values).
        history: All committed generations.
    """

    def __init__(
        self,
        policy: CoordinatorPolicy,
        *,
        seed: int = 0,
        timing: Timing | None = None,
        elastic: bool = True,
        build: Callable[[CoordinatorPolicy, StoreView, float], Coordinator] = Coordinator,
    ) -> None:
        self.policy = policy
        self.timing = timing or Timing()
        self.now = 0.0
        self.store = SimulatedStore()
        self.nodes: dict[NodeId, SimulatedNode] = {}
        self.history: list[HistoryEntry] = []
        self._trained_s = 0.0
        self.members: dict[NodeId, int] = {}
        self.host = CoordinatorHost(self, policy, build)
        self._training_since: float | None = None
        self._entered: set[NodeId] = set()
        self._elastic = elastic
        self._rng = random.Random(seed)
        self._queue: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0
        self._names = 0

    # ---- time --------------------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end:
            self.step()
        self.now = end

    def step(self) -> bool:
        """Let the next thing happen; return whether there was one."""
        if not self._queue:
            return False
        at, _, action = heapq.heappop(self._queue)
        self.now = max(self.now, at)
        action()
        return True

    def after(self, delay: float, action: Callable[[], object]) -> None:
        """Let something happen later."""
        self._order += 1
        heapq.heappush(self._queue, (self.now + delay, self._order, action))

    # ---- what a test does to the world -------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the current generation, 0 before the first."""
        return self.store.entry.generation.number if self.store.entry else 0

    @property
    def is_training(self) -> bool:
        """Whether all members are in the current generation and nothing broke it."""
        return self._training_since is not None

    @property
    def closed(self) -> Closed | None:
        """How the run ended."""
        return self.store.closed

    @property
    def trained_s(self) -> float:
        """Seconds in which some generation was complete and unbroken."""
        return self._trained_s + (
            self.now - self._training_since if self._training_since is not None else 0.0
        )

    @property
    def writes(self) -> int:
        """Keys that nodes and coordinators wrote, assignments included."""
        return self.store.revision + sum(len(entry.members) for entry in self.history)

    def steps(self) -> int:
        """Return the steps that were trained so far."""
        return int(self.trained_s * self.timing.steps_per_s)

    def add_node(self, *, slots: int = 1) -> NodeId:
        """A node registers and sets itself up."""
        self._names += 1
        return self._register(f"n{self._names}", slots)

    def kill(self, node_id: NodeId) -> None:
        """A machine is gone from one moment to the next."""
        node = self.nodes[node_id]
        node.is_dead = True
        self._go_down(node, breaks_peers=True)

    def freeze(self, node_id: NodeId) -> None:
        """A machine stands still: its peers wait, and only a neighbour or its lease tells."""
        node = self.nodes[node_id]
        if node.down_since is not None:
            return
        self._go_down(node, breaks_peers=False)
        if node_id in self.members:
            moment = node.down_since
            self.after(self.timing.suspect, lambda: self._end_lease_if_down_since(node, moment))

    def thaw(self, node_id: NodeId) -> None:
        """A frozen machine goes on; it registers anew if its lease ended meanwhile."""
        node = self.nodes[node_id]
        if node.is_dead or node.down_since is None:
            return
        node.down_since = None
        node.up_since = self.now
        if node_id not in self.store.nodes:
            self._register_again(node)
            return
        self._notice_current(node_id)
        self._train_if_complete()
        self.host.thaw(node_id)

    def fail_worker(
        self, node_id: NodeId, *, exit_code: int = 137, started: bool = True, report_after: float = 0.0
    ) -> None:
        """A worker of a member ends by itself; its peers' collectives break.

        Args:
            node_id: A member that is in the current generation; else nothing happens.
            exit_code: As in `Failure`.
            started: Whether its group had been formed.
            report_after: Until its agent has noticed and written it down.
        """
        node, number = self.nodes[node_id], self.number
        if node.down_since is not None or node_id not in self._entered or not node.is_unbroken(number):
            return
        self._stop_training()
        node.has_failed_worker = True
        failure = Failure(
            node_id=node_id,
            generation=number,
            rank=self.members[node_id],
            local_rank=0,
            exit_code=exit_code,
            message="died",
            step=self.steps() if started else -1,
            started=started,
        )
        self._break_peers(node_id)
        self.after(report_after, lambda: self._report_failed(node, failure))

    def drain(self, node_id: NodeId) -> None:
        """A node is asked to leave; it waits a little for a generation without it."""
        node = self.nodes[node_id]
        if node.down_since is not None or node_id not in self.store.nodes:
            return
        self._write(node, phase=NodePhase.DRAINING)
        self.after(self.timing.drain_patience, lambda: self._leave(node))

    def set_target(self, nodes: int) -> None:
        """The flow wants another number of nodes."""
        self.store.target = Target(nodes=nodes)
        self.store.next_revision()
        self.host.tell(TargetChanged(target=self.store.target))

    def stop(self, reason: str) -> None:
        """The flow ends the run; every agent follows by itself."""
        self.store.stop_reason = reason
        self.store.next_revision()
        self.host.tell(StopRequested(reason=reason))
        for node in list(self.store.nodes.values()):
            self.after(10 * self.timing.leave, partial(self._follow_stop, node))

    def finish(self, pause: float = 0.01) -> None:
        """The members that train reach the end of the job, one after the other."""
        number = self.number
        if any(node_id not in self._entered or self.is_down(node_id) for node_id in self.members):
            return
        for delay, node_id in enumerate(self.members):
            node = self.nodes[node_id]
            self.after(pause * delay, partial(self._succeed, node, number))

    # ---- nodes -------------------------------------------------------------------------------

    def is_down(self, node_id: NodeId) -> bool:
        """Whether a node does not answer."""
        return self.nodes[node_id].down_since is not None

    def _register(self, name: str, slots: int) -> NodeId:
        record = replace(
            make_record(name, len(self.nodes) + 1),
            slots=slots,
            phase=NodePhase.WARMING,
            lease=LeaseId(len(self.nodes) + 1),
        )
        node = SimulatedNode(record=record, joined=self.store.next_revision(), up_since=self.now)
        self.nodes[record.node_id] = node
        self.store.nodes[record.node_id] = node
        self.host.tell(NodeSeen(record=record, joined=node.joined))
        self.after(self.timing.set_up * (0.5 + self._rng.random()), lambda: self._become_ready(node))
        self.host.elect()
        return record.node_id

    def _register_again(self, node: SimulatedNode) -> None:
        """A node whose lease ended comes back under a new name: an old one is fenced for ever."""
        node.is_dead = True
        node.down_since = self.now
        name, _, incarnation = node.record.node_id.partition(".")
        self._register(f"{name}.{int(incarnation or 0) + 1}", node.record.slots)

    def _become_ready(self, node: SimulatedNode) -> None:
        if node.down_since is None and node.record.phase is NodePhase.WARMING:
            self._write(node, phase=NodePhase.READY)
            self._notice_current(node.record.node_id)

    def _write(self, node: SimulatedNode, **changes: object) -> None:
        node_id = node.record.node_id
        if node_id not in self.store.nodes or node.down_since is not None:
            return
        node.record = replace(node.record, step=self.steps(), **changes)  # type: ignore[arg-type]
        self.store.next_revision()
        self.host.tell(NodeSeen(record=node.record, joined=node.joined))

    def _go_down(self, node: SimulatedNode, *, breaks_peers: bool) -> None:
        if node.down_since is None:
            node.down_since = moment = self.now
            delay = self.timing.ttl + self._rng.random() * self.timing.ttl_jitter
            self.after(delay, lambda: self._end_lease_if_down_since(node, moment))
        if node.record.node_id in self.members:
            self._stop_training()
            if breaks_peers:
                self._break_peers(node.record.node_id)

    def _end_lease_if_down_since(self, node: SimulatedNode, moment: float | None) -> None:
        if node.down_since is not None and node.down_since == moment:
            self.end_lease(node)

    def end_lease(self, node: SimulatedNode) -> None:
        """A node's lease is over, by its end or by a fence; an agent that still runs registers anew."""
        node_id = node.record.node_id
        if self.store.nodes.pop(node_id, None) is None:
            return
        self.store.next_revision()
        self.host.tell(NodeGone(node_id=node_id))
        if node.down_since is None:
            self._go_down(node, breaks_peers=True)
            self._register_again(node)
        if self.host.leader == node_id:
            self.host.forget()

    def _leave(self, node: SimulatedNode) -> None:
        """A node ends on purpose: its key is gone at once."""
        node_id = node.record.node_id
        if node.down_since is not None or node_id not in self.store.nodes:
            return
        node.is_dead = True
        node.down_since = self.now
        if node_id in self.members:
            self._stop_training()
            self._break_peers(node_id)
        self.end_lease(node)

    def _follow_stop(self, node: SimulatedNode) -> None:
        if self.closed is not None:
            return
        if self.host.leader == node.record.node_id:
            self._stop_training()
            self._write(node, phase=NodePhase.DRAINING, generation=0)
        else:
            self._leave(node)

    def _succeed(self, node: SimulatedNode, number: int) -> None:
        if node.is_unbroken(number):
            self._stop_training()
            self._write(node, phase=NodePhase.SUCCEEDED)

    def _report_failed(self, node: SimulatedNode, failure: Failure) -> None:
        if node.down_since is not None or node.record.node_id not in self.store.nodes:
            return
        node.has_failed_worker = False
        self.store.failures.append(failure)
        phase = NodePhase.WARMING if self._elastic else node.record.phase
        self._write(node, failed=failure.generation, phase=phase)
        self.host.tell(FailureReported(failure=failure))
        if self._elastic:
            self.after(self.timing.set_up, lambda: self._become_ready(node))
        self._notice_current(node.record.node_id)

    def _break_peers(self, node_id: NodeId) -> None:
        number = self.number
        for peer_id in self.members:
            if peer_id != node_id and peer_id in self._entered:
                self.after(self.timing.breaks, partial(self._report_broken, peer_id, number))

    def _report_broken(self, node_id: NodeId, number: int) -> None:
        node = self.nodes[node_id]
        is_over = node.record.phase in (NodePhase.SUCCEEDED, NodePhase.WARMING)
        if number == self.number and not is_over and node.is_unbroken(number):
            self._stop_training()
            self._write(node, broken=number)

    # ---- generations -------------------------------------------------------------------------

    def _notice_current(self, node_id: NodeId) -> None:
        """An agent sees `current` and acts on it."""
        node, number = self.nodes[node_id], self.number
        if node.down_since is not None or node_id not in self.store.nodes or self.closed is not None:
            return
        if node_id not in self.members:
            if node.record.phase is NodePhase.DRAINING:
                self.after(self.timing.leave, lambda: self._leave(node))
            return
        is_ready = node.record.phase is NodePhase.READY and not node.has_failed_worker
        if node.record.generation >= number or not is_ready:
            return
        self._write(node, generation=number)
        self._entered.add(node_id)
        self._train_if_complete()
        if len(self._entered) == 1:
            self.after(self.timing.form, lambda: self._give_up_forming(number))

    def _give_up_forming(self, number: int) -> None:
        if number == self.number and self._training_since is None and self.closed is None:
            for node_id in self.members:
                if node_id in self._entered:
                    self._report_broken(node_id, number)

    def _train_if_complete(self) -> None:
        """Train when all members are in the generation, and it is unbroken."""
        if self._training_since is None and len(self._entered) == len(self.members):
            nodes = [self.nodes[node_id] for node_id in self.members]
            if all(node.down_since is None and node.is_unbroken(self.number) for node in nodes):
                self._training_since = self.now

    def _stop_training(self) -> None:
        if self._training_since is not None:
            self._trained_s += self.now - self._training_since
            self._training_since = None

    def flip(self, entry: HistoryEntry) -> None:
        """`current` is written; every agent will see it."""
        self._stop_training()
        self._entered = set()
        self.store.entry = entry
        self.members = {member.node_id: member.first_rank for member in entry.members}
        self.store.current_revision = self.store.next_revision()
        self.store.failures = []
        self.history.append(entry)
        for node_id in self.store.nodes:
            delay = self.timing.enter * (0.5 + self._rng.random())
            self.after(delay, partial(self._notice_current, node_id))
