"""The protocol's safety, checked from outside at each command of a simulated coordinator.

Nothing here looks into a coordinator: the checks compare what it was told with what it
asks for, and with what a simulation knows of the world. Names are those of
`docs/protocol.md`.
"""

from __future__ import annotations

from collections.abc import Callable

from elastic_core.errors import ElasticError
from elastic_core.ids import NodeId, Revision
from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    CoordinatorEvent,
    CoordinatorPolicy,
    FailureReported,
    FenceNode,
    NodeGone,
    NodeSeen,
    PublishGeneration,
    StoreView,
    TargetChanged,
)


class InvariantViolated(ElasticError):
    """A coordinator broke the protocol.

    Attributes:
        name: "S1" to "S10", or "L1" to "L5".
    """

    def __init__(self, name: str, problem: str) -> None:
        self.name = name
        super().__init__(f"{name}: {problem}")


class Witness:
    """Hears what one coordinator hears, and judges what it asks for.

    Args:
        down_since: Tells since when a node does not answer, None while it does.
        up_since: Tells since when it answers.
    """

    def __init__(
        self,
        policy: CoordinatorPolicy,
        view: StoreView,
        now: float,
        *,
        down_since: Callable[[NodeId], float | None],
        up_since: Callable[[NodeId], float],
    ) -> None:
        self.policy = policy
        self._started_at = now
        self._down_since = down_since
        self._up_since = up_since
        self._writing: PublishGeneration | CloseRun | None = None
        self._adopt(view, now)

    @property
    def limit(self) -> int:
        """Members at most."""
        wanted = self._target.nodes if self._target else self.policy.max_nodes
        allowed = self.allowed
        return max((size for size in allowed if size <= wanted), default=allowed[0])

    @property
    def allowed(self) -> list[int]:
        """The sizes that a generation may have, ascending."""
        policy = self.policy
        listed, step = policy.sizes.listed, policy.sizes.multiple_of
        bounds = range(policy.min_nodes, policy.max_nodes + 1)
        return [size for size in bounds if (size in listed if listed else size % step == 0)]

    # ---- what it hears -----------------------------------------------------------------------

    def hear(self, event: CoordinatorEvent, now: float) -> None:
        """Take note of an event before the coordinator gets it."""
        match event:
            case NodeSeen(record=record):
                self._records[record.node_id] = record
                self._hear_report(record.node_id, now)
            case NodeGone(node_id=node_id):
                self._records.pop(node_id, None)
            case FailureReported(failure=failure):
                self._failed_in[failure.node_id] = failure.generation
                self._hear_report(failure.node_id, now)
            case TargetChanged(target=target):
                self._target = target
            case CommitSucceeded(revision=revision):
                self._succeed(revision, now)
            case CommitFailed(view=view):
                self._adopt(view, now)
            case _:
                pass

    def _succeed(self, revision: Revision, now: float) -> None:
        if isinstance(self._writing, PublishGeneration):
            self._set_entry(self._writing.entry, revision)
        self._writing = None
        self._hear_all_reports(now)

    def _adopt(self, view: StoreView, now: float) -> None:
        self._set_entry(view.history, view.current_revision)
        self._records: dict[NodeId, NodeRecord] = {record.node_id: record for record in view.nodes}
        self._failed_in = {failure.node_id: failure.generation for failure in view.failures}
        self._target = view.target
        self._closed = view.closed
        self._writing = None
        self._hear_all_reports(now)

    def _set_entry(self, entry: HistoryEntry | None, revision: Revision) -> None:
        self._entry = entry
        self._revision = revision
        self._number = entry.generation.number if entry else 0
        self._members = [member.node_id for member in entry.members] if entry else []
        self._reported_at: float | None = None

    def _hear_report(self, node_id: NodeId, now: float) -> None:
        if self._reported_at is None and self._has_reported(node_id) and node_id in self._members:
            self._reported_at = now

    def _hear_all_reports(self, now: float) -> None:
        if self._has_report():
            self._reported_at = now

    def _has_reported(self, node_id: NodeId) -> bool:
        record = self._records.get(node_id)
        by_record = record is not None and max(record.broken, record.failed) >= self._number
        return by_record or self._failed_in.get(node_id, 0) >= self._number

    def _has_report(self) -> bool:
        return self._number > 0 and any(self._has_reported(node_id) for node_id in self._members)

    # ---- what it judges ----------------------------------------------------------------------

    def judge(self, command: CoordinatorCommand, now: float) -> None:
        """Raise InvariantViolated if the command breaks the protocol."""
        match command:
            case PublishGeneration(entry=entry):
                self._one_write_at_a_time(command)
                self._judge_numbers(command)
                self._judge_members(entry)
                self._judge_ranks(command)
                self._judge_order(entry)
                self._judge_cause(entry)
                self._judge_restarts(entry)
                self._writing = command
            case CloseRun(closed=closed):
                self._one_write_at_a_time(command)
                self._judge_outcome(closed, now)
                self._writing = command
            case FenceNode(node_id=node_id):
                self._judge_fence(node_id, now)
            case _:
                pass

    def _one_write_at_a_time(self, command: PublishGeneration | CloseRun) -> None:
        if isinstance(self._writing, PublishGeneration):
            raise InvariantViolated("S5", f"{command} while {self._writing} has no outcome")
        if self._closed is not None or self._writing is not None:
            raise InvariantViolated("S10", f"{command} after the run was closed")

    def _judge_numbers(self, command: PublishGeneration) -> None:
        if command.generation.number != self._number + 1:
            raise InvariantViolated("S1", f"{command.generation.number} follows {self._number}")
        if command.based_on != self._revision:
            raise InvariantViolated("S5", f"based on revision {command.based_on}, not {self._revision}")

    def _judge_members(self, entry: HistoryEntry) -> None:
        for member in entry.members:
            record = self._records.get(member.node_id)
            if record is None or record.phase is not NodePhase.READY:
                raise InvariantViolated("S2", f"{member.node_id} is a member and is {record}")
        if len(entry.members) not in self.allowed or len(entry.members) > self.limit:
            raise InvariantViolated("S3", f"{len(entry.members)} members")

    def _judge_ranks(self, command: PublishGeneration) -> None:
        next_rank = 0
        members = command.entry.members
        if len(members) != len(command.assignments):
            raise InvariantViolated(
                "S4", f"{len(command.assignments)} assignments for {len(members)} members"
            )
        for group_rank, (member, told) in enumerate(zip(members, command.assignments, strict=True)):
            ranks = (group_rank, next_rank, self._records[member.node_id].slots)
            if (member.group_rank, member.first_rank, member.slots) != ranks:
                raise InvariantViolated("S4", f"{member} does not continue at rank {next_rank}")
            if (told.node_id, told.group_rank, told.first_rank, told.slots) != (member.node_id, *ranks):
                raise InvariantViolated("S4", f"{told} is not {member}")
            next_rank += member.slots
        if (command.generation.world_size, command.generation.group_world_size) != (next_rank, len(members)):
            raise InvariantViolated("S4", f"{command.generation} has {next_rank} ranks")

    def _judge_order(self, entry: HistoryEntry) -> None:
        chosen = [member.node_id for member in entry.members]
        kept = set(chosen)
        previous = [node for node in self._members if node in kept]
        if chosen[: len(previous)] != previous:
            raise InvariantViolated("S7", f"survivors {previous} became {chosen}")

    def _judge_cause(self, entry: HistoryEntry) -> None:
        """S8: the named cause is the one that the facts show."""
        cause = entry.generation.cause
        chosen = {member.node_id for member in entry.members}
        before = set(self._members)
        records = [self._records.get(node) for node in before]
        is_true = {
            Cause.START: self._entry is None,
            Cause.JOIN: bool(chosen - before) and before <= chosen,
            Cause.RESCALE: chosen < before and len(before) > self.limit,
            Cause.DRAIN: any(record is None or record.phase is NodePhase.DRAINING for record in records),
            Cause.LOSS: any(record is None or self._is_unfit(record) for record in records),
            Cause.FAILURE: self._has_report() and None not in records,
        }
        if not is_true[cause] or (self._entry is None) != (cause is Cause.START):
            raise InvariantViolated("S8", f"{entry} does not follow from {self._entry}")

    def _is_unfit(self, record: NodeRecord) -> bool:
        return record.phase is NodePhase.WARMING and not (
            record.failed >= self._number or self._failed_in.get(record.node_id, 0) >= self._number
        )

    def _judge_restarts(self, entry: HistoryEntry) -> None:
        before = self._entry.generation.restart_count if self._entry else 0
        is_failure = entry.generation.cause is Cause.FAILURE
        if entry.generation.restart_count != before + is_failure:
            raise InvariantViolated("S9", f"{before} restarts, then {entry.generation}")
        if entry.generation.restart_count > self.policy.max_restarts:
            raise InvariantViolated("S9", f"{entry.generation} is over the budget {self.policy.max_restarts}")
        if is_failure:
            self._judge_attribution(entry)

    def _judge_attribution(self, entry: HistoryEntry) -> None:
        """A member that was down before the first report explains it: that is a loss."""
        for node_id in self._members:
            down = self._down_since(node_id)
            if down is None or self._reported_at is None or self._has_reported(node_id):
                continue
            if down < self._reported_at:
                raise InvariantViolated("S9", f"{entry.generation} counts, but {node_id} was down at {down}")

    def _judge_outcome(self, closed: Closed, now: float) -> None:
        restarts = self._entry.generation.restart_count if self._entry else 0
        is_spent = restarts >= self.policy.max_restarts
        if closed.outcome is Outcome.FAILED and not (
            is_spent or "cannot mend" in closed.reason or "unsteady" in closed.reason
        ):
            raise InvariantViolated("S9", f"{closed} after {restarts} of {self.policy.max_restarts} restarts")
        if closed.outcome is Outcome.SUCCEEDED and not self._has_finished():
            raise InvariantViolated("S10", f"{closed} while members still train")
        if closed.outcome is Outcome.BELOW_MINIMUM:
            ready = sum(record.phase is NodePhase.READY for record in self._records.values())
            earliest = self._started_at + self.policy.join_timeout
            if ready >= self.allowed[0] or now < earliest:
                raise InvariantViolated("L1", f"{closed} with {ready} nodes ready")

    def _has_finished(self) -> bool:
        """Whether rank 0's node finished, and all others that are there unless it did so earlier."""
        known = [self._records.get(node_id) for node_id in self._members]
        is_early = known[0] is not None and known[0].generation < self._number
        return is_early or all(record is None or record.phase is NodePhase.SUCCEEDED for record in known)

    def _judge_fence(self, node_id: NodeId, now: float) -> None:
        if self._down_since(node_id) is None and now - self._up_since(node_id) > self.policy.probe_timeout:
            raise InvariantViolated("S2", f"{node_id} is fenced and was well all the time")
