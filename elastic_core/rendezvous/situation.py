"""All that a coordinator knows of its run, and since when; it decides nothing.

Facts come in one at a time and each costs constant time, so that 10,000 nodes can
report one after another. Where the members stand is kept as sets, derived from the
nodes' records alone: whatever order facts come in, the same records give the same sets.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from typing import Final

from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause, Closed, Generation, Member, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.decision import nodes_of
from elastic_core.rendezvous.events import CoordinatorPolicy, PublishGeneration, StoreView

CHANGES: Final = (Cause.JOIN, Cause.LOSS, Cause.DRAIN)
"""Causes that nobody asked the run for."""
DRAINED: Final = "drained"
"""Fate of a member that left on purpose; what its provider had announced follows."""


@dataclass(slots=True)
class Inquiry:
    """The question who of the members lives, open since the generation came into trouble.

    Attributes:
        opened_at: Since when the generation is in trouble.
        deadline: Until then the root cause is waited for.
        silent: Members that neither reported nor answered yet.
        rounds: How often they were asked.
        asked_at: When they were asked last.
    """

    opened_at: float
    deadline: float
    silent: set[NodeId]
    rounds: int = 0
    asked_at: float = 0.0


@dataclass(slots=True)
class Standing:
    """Where the members of the current generation stand; a member may be in several sets.

    Attributes:
        lost: Their key is gone, for any reason but having succeeded.
        crashed: Those of the lost that did not announce it by a drain.
        draining: Leave on purpose and are still there.
        done: Their workers ended well (also if the node left afterwards).
        reported: Said that this generation broke or failed under their workers.
        failed: Those of the reported with a failed worker of their own.
        unfit: Not set up, and not because of this generation: they cannot enter it.
        fit: Ready, so that they can enter the next generation.
        intact: Those of the fit that have no failed worker: they carry the training state.
        entered: Act on this generation.
        left: Take no part any more, as a stop demands of everyone.
    """

    lost: set[NodeId] = field(default_factory=set)
    crashed: set[NodeId] = field(default_factory=set)
    draining: set[NodeId] = field(default_factory=set)
    done: set[NodeId] = field(default_factory=set)
    reported: set[NodeId] = field(default_factory=set)
    failed: set[NodeId] = field(default_factory=set)
    unfit: set[NodeId] = field(default_factory=set)
    fit: set[NodeId] = field(default_factory=set)
    intact: set[NodeId] = field(default_factory=set)
    entered: set[NodeId] = field(default_factory=set)
    left: set[NodeId] = field(default_factory=set)
    _groups: tuple[set[NodeId], ...] = ()

    def __post_init__(self) -> None:
        self._groups = (
            self.lost, self.crashed, self.draining, self.done, self.reported, self.failed,
            self.unfit, self.fit, self.intact, self.entered, self.left,
        )  # fmt: skip

    def remove(self, node_id: NodeId) -> None:
        """Take a node out of every set."""
        for group in self._groups:
            group.discard(node_id)


class Situation:
    """What is known of a run. `Coordinator` changes it, the rules read it.

    Attributes:
        due_since: Since when a new generation is due (also while it has to wait), or None.
        enough_since: Since when the minimum of nodes is ready, or None.
        short_since: When it was that the minimum was missed first; has a meaning only while it is.
        target: What the flow wants.
        limit: Members at most: what the flow wants, within the bounds and the allowed sizes of the run.
        least: Members that a generation has at least: the run's own minimum, or a higher one that was set.
        forming: Seconds until all members had entered the current generation; infinite while they have
            not, and where an earlier coordinator published it.
        formed_since: When this coordinator learned of the current generation.
        went: How each lost member went, in words.
        fenced: Silent members whose leases were revoked, and when that was asked for last.
        reached: The highest step that any node reported.
        changes: When members came or went, as far back as this coordinator leads; at most as many as
            the limit, for older ones decide nothing.
        refusals: Commits in a row that failed without a new generation.
    """

    def __init__(self, policy: CoordinatorPolicy, view: StoreView, now: float) -> None:
        self.policy = policy
        self.nodes: dict[NodeId, NodeRecord] = {}
        self.joined: dict[NodeId, Revision] = {}
        self.ready: set[NodeId] = set()
        self.current: Generation | None = None
        self.current_revision = NO_REVISION
        self.entry: HistoryEntry | None = None
        self.members: dict[NodeId, Member] = {}
        self.standing = Standing()
        self.failures: list[Failure] = []
        self._failed_in: dict[NodeId, int] = {}
        self.aim(None)
        self.stop_reason: str | None = None
        self.stop_since = now
        self.closed: Closed | None = None
        self.publishing: PublishGeneration | None = None
        self.closing: Closed | None = None
        self.inquiry: Inquiry | None = None
        self.fenced: dict[NodeId, float] = {}
        self.went: dict[NodeId, str] = {}
        self.reached = 0
        self.due_since: float | None = None
        self.enough_since: float | None = None
        self.short_since = now
        self.done_since: float | None = None
        self.formed_since = now
        self.forming = inf
        self._is_forming = False
        self.changes: deque[float] = deque(maxlen=policy.changes_per_hour)
        self.refusals = 0
        self.refused_at = now
        self.adopt(view, now)

    # ---- questions ---------------------------------------------------------------------------

    @property
    def number(self) -> int:
        """Number of the current generation, 0 before the first."""
        return self.current.number if self.current else 0

    @property
    def restarts(self) -> int:
        """Restarts that were spent up to the current generation."""
        return self.current.restart_count if self.current is not None else 0

    @property
    def size(self) -> int:
        """Members that the next generation would have now; 0 where no allowed size can be formed."""
        return self.policy.sizes.largest_within(min(self.limit, len(self.ready)))

    @property
    def first(self) -> NodeId:
        """The member with rank 0."""
        return next(iter(self.members))

    @property
    def is_broken(self) -> bool:
        """Whether something unplanned happened to the current generation."""
        return bool(self.standing.reported or self.standing.crashed)

    @property
    def is_explained(self) -> bool:
        """Whether the set of members changed, which explains any failure of the others."""
        return bool(self.standing.lost or self.standing.draining or self.standing.unfit)

    @property
    def has_newcomers(self) -> bool:
        """Whether ready nodes are no members yet although they make up a larger generation."""
        return len(self.ready) > len(self.standing.fit) and self.size > len(self.members)

    @property
    def is_failure_due(self) -> bool:
        """Whether the current generation ended by a failure that no change of its members explains."""
        return bool(self.standing.reported) and not self.is_explained

    @property
    def is_change_due(self) -> bool:
        """Whether the current generation should be followed by another."""
        return self.current is None or self.is_broken or self.is_explained or self.is_change_planned

    @property
    def is_at_rest(self) -> bool:
        """Whether a generation is in force and nothing is due or under way; asked at each fact."""
        is_asked = self.stop_reason is not None or self.publishing is not None or self.closing is not None
        is_over = self.closed is not None or bool(self.standing.done)
        return self.due_since is None and not is_asked and not is_over and self.refusals < 2

    @property
    def is_change_planned(self) -> bool:
        """Whether nodes should come or go although all is well; never while the run finishes."""
        return not self.standing.done and (self.has_newcomers or len(self.members) > self.limit)

    def root_cause(self) -> Failure | None:
        """Return the first failure of the current generation that is no consequence, if any is known."""
        return next((failure for failure in self.failures if not failure.consequence), None)

    def fate(self, node_id: NodeId) -> str:
        """Say why a member of the current generation will not be in the next one."""
        standing = self.standing
        if node_id in standing.lost:
            return self.went.get(node_id, "lease ended")
        if node_id in standing.draining:
            return _drained(self.nodes[node_id])
        if node_id in standing.done:
            return "succeeded"
        if node_id in standing.failed:
            return "worker failed"
        return "not set up" if node_id in standing.unfit else "released"

    def partly_finished(self) -> str:
        """Say who finished and who did not, as far as the step is known."""
        done = self.standing.done
        finished = [node for node in self.members if node in done]
        record = self.nodes.get(finished[0])
        step = f" at step {record.step}" if record is not None and record.step > 0 else ""
        others = [node for node in self.members if node not in done]
        return f"{self._ranks(finished)} finished{step}, {self._ranks(others)} still"

    def _ranks(self, nodes: list[NodeId]) -> str:
        """Name the first of some members by its first rank, and count the others."""
        member = self.members[nodes[0]]
        more = f" and {nodes_of(len(nodes) - 1)} more" if len(nodes) > 1 else ""
        return f"rank {member.first_rank} (node {member.node_id}){more}"

    # ---- facts -------------------------------------------------------------------------------

    def aim(self, target: Target | None) -> None:
        """The flow wants so many nodes; the bounds and the allowed sizes of the run hold all the same."""
        policy, sizes = self.policy, self.policy.sizes
        least = 0 if target is None else min(target.least, policy.max_nodes)
        wanted = policy.max_nodes if target is None else min(target.nodes, policy.max_nodes)
        self.target = target
        self.least = max(policy.least, sizes.least_from(least))
        self.limit = sizes.largest_within(max(wanted, self.least))

    def see(self, record: NodeRecord, joined: Revision) -> None:
        """A node's record was written."""
        node_id = record.node_id
        self.nodes[node_id] = record
        self.joined[node_id] = joined
        self.reached = max(self.reached, record.step)
        if record.phase is NodePhase.READY and node_id not in self.fenced:
            self.ready.add(node_id)
        else:
            self.ready.discard(node_id)
        if node_id in self.members:
            self._place(node_id)

    def lose(self, node_id: NodeId) -> None:
        """A node's key is gone."""
        record = self.nodes.pop(node_id, None)
        self.joined.pop(node_id, None)
        self.ready.discard(node_id)
        was_fenced = self.fenced.pop(node_id, None) is not None
        if node_id not in self.members:
            return
        if record is not None:
            self.went[node_id] = self._farewell(record, was_fenced=was_fenced)
        self._place(node_id)
        self._account_for(node_id)

    def answer(self, node_id: NodeId) -> None:
        """A probed node answered; once it is fenced that comes too late."""
        if node_id not in self.fenced:
            self._account_for(node_id)

    def report(self, failure: Failure) -> None:
        """A node wrote down why its workers failed; what is of no concern any more is dropped."""
        if failure.generation < self.number or (self.current and failure.generation == 0):
            return
        self.failures.append(failure)
        self._failed_in[failure.node_id] = failure.generation
        self.reached = max(self.reached, failure.step)
        if failure.node_id in self.members and failure.generation == self.number:
            self._place(failure.node_id)

    def install(self, entry: HistoryEntry, revision: Revision, now: float) -> None:
        """A generation is in force: forget all that concerned the one before."""
        number = entry.generation.number
        self.current = entry.generation
        self.current_revision = revision
        self.entry = entry
        self.members = {member.node_id: member for member in entry.members}
        self.reached = max(self.reached, entry.step)
        self.failures = [
            failure
            for failure in self.failures
            if failure.generation >= number and failure.node_id in self.members
        ]
        if entry.generation.cause in CHANGES:
            self.changes.append(now)
        self.inquiry = None
        self.fenced = {}
        self.formed_since = now
        self.forming = inf
        self._is_forming = self.publishing is not None
        self.publishing = None
        self.due_since = None
        self.done_since = None
        self.refusals = 0
        self.went = {node: how for node, how in self.went.items() if node in self.members}
        self._place_all()

    def adopt(self, view: StoreView, now: float) -> None:
        """Replace everything by what the store says; only waits that still hold go on."""
        number = self.number
        joined = dict(view.joined)
        for node_id in self.nodes.keys() - {record.node_id for record in view.nodes}:
            self.lose(node_id)
        self.aim(view.target)
        self.closed = view.closed
        self._adopt_stop(view.stop_reason, now)
        if view.current is not None and view.current.number != number:
            entry = view.history or HistoryEntry(generation=view.current, members=())
            self.install(entry, view.current_revision, now)
        self.current_revision = view.current_revision
        self.failures = []
        self._failed_in = {}
        for record in view.nodes:
            self.see(record, joined[record.node_id])
        for failure in view.failures:
            self.report(failure)
        self._place_all()
        if self.publishing is not None or self.closing is not None:
            self.refusals += 1
            self.refused_at = now
        self.publishing = None
        self.closing = None

    def request_stop(self, reason: str, now: float) -> None:
        """The run shall end at the next step boundary."""
        self._adopt_stop(reason, now)

    def update_clocks(self, now: float) -> None:
        """Note since when what holds now holds; called after each fact."""
        if not self.is_change_due:
            self.due_since = None
        elif self.due_since is None:
            self.due_since = now
        if self._is_forming and len(self.standing.entered) == len(self.members):
            self.forming = now - self.formed_since
            self._is_forming = False
        if len(self.ready) < self.least:
            if self.enough_since is not None:
                self.short_since = now
            self.enough_since = None
        elif self.enough_since is None:
            self.enough_since = now
        if self.standing.done and self.done_since is None:
            self.done_since = now
        if not self.is_broken:
            self.inquiry = None
        elif self.inquiry is None:
            deadline = now + self.policy.probe_timeout
            self.inquiry = Inquiry(opened_at=now, deadline=deadline, silent=set(self.unheard()))

    def note_probe(self, now: float) -> None:
        """The silent members are being asked."""
        if self.inquiry is not None:
            self.inquiry.rounds += 1
            self.inquiry.asked_at = now

    def note_fence(self, node_id: NodeId, now: float) -> None:
        """A node's lease is being revoked: from now on it is no candidate, whatever it says."""
        self.fenced[node_id] = now
        self.ready.discard(node_id)
        self._place(node_id)

    def _account_for(self, node_id: NodeId) -> None:
        if self.inquiry is not None:
            self.inquiry.silent.discard(node_id)

    def _adopt_stop(self, reason: str | None, now: float) -> None:
        if reason is not None and self.stop_reason is None:
            self.stop_since = now
        self.stop_reason = reason

    def _farewell(self, record: NodeRecord, *, was_fenced: bool) -> str:
        if was_fenced:
            return f"silent for {self.policy.probe_timeout:g} s"
        words = {NodePhase.DRAINING: _drained(record), NodePhase.SUCCEEDED: "succeeded"}
        return words.get(record.phase, "lease ended")

    def unheard(self) -> Iterable[NodeId]:
        """Yield the members that said nothing of what happened to the current generation."""
        known = self.standing
        heard = known.lost | known.reported | known.draining | known.done
        return (node_id for node_id in self.members if node_id not in heard)

    def _place_all(self) -> None:
        self.standing = Standing()
        for node_id in self.members:
            self._place(node_id)

    def _place(self, node_id: NodeId) -> None:
        """Put a member into the sets of its standing, from its record alone."""
        self.standing.remove(node_id)
        record = self.nodes.get(node_id)
        if record is None:
            self._place_absent(node_id)
        else:
            self._place_present(node_id, record)

    def _place_absent(self, node_id: NodeId) -> None:
        standing = self.standing
        standing.left.add(node_id)
        how = self.went.get(node_id)
        if how == "succeeded":
            standing.done.add(node_id)
            return
        standing.lost.add(node_id)
        if how is None or not how.startswith(DRAINED):
            standing.crashed.add(node_id)

    def _place_present(self, node_id: NodeId, record: NodeRecord) -> None:
        standing, number = self.standing, self.number
        has_failed = max(record.failed, self._failed_in.get(node_id, 0)) >= number
        if has_failed or record.broken >= number:
            standing.reported.add(node_id)
            self.answer(node_id)
        if has_failed:
            standing.failed.add(node_id)
        if record.generation >= number:
            standing.entered.add(node_id)
        match record.phase:
            case NodePhase.READY:
                self._place_ready(node_id, has_failed=has_failed)
            case NodePhase.WARMING:
                standing.left.add(node_id)
                if not has_failed:
                    standing.unfit.add(node_id)
            case NodePhase.DRAINING:
                standing.draining.add(node_id)
                if record.generation == 0:
                    standing.left.add(node_id)
            case NodePhase.SUCCEEDED:
                standing.left.add(node_id)
                standing.done.add(node_id)

    def _place_ready(self, node_id: NodeId, *, has_failed: bool) -> None:
        if node_id in self.fenced:
            return
        self.standing.fit.add(node_id)
        if not has_failed:
            self.standing.intact.add(node_id)


def _drained(record: NodeRecord) -> str:
    """Say that a node left on purpose, and what its provider had announced."""
    return f"{DRAINED}: {record.notice}" if record.notice else DRAINED
