"""The mutants: each breaks one thing on purpose, in the running process only."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from elastic_core.ids import NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause, Member
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.planning import reconciliation
from elastic_core.rendezvous import coordinator, rules, situation
from elastic_core.rendezvous.decision import Decision
from elastic_core.rendezvous.events import CommitFailed, StoreView, WakeAt
from elastic_core.rendezvous.situation import Situation

Plant = Callable[[], tuple[object, str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """A planted bug.

    Attributes:
        breaks: The invariant that it breaks first.
        plant: Returns the owner, the attribute's name and the bad value for it.
        is_planning: Found by the properties of planning, not by those of rendezvous.
    """

    name: str
    breaks: str
    plant: Plant
    is_planning: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Have the bug within the block."""
        owner, attribute, bad = self.plant()
        good = owner.__dict__[attribute]
        setattr(owner, attribute, bad)
        try:
            yield
        finally:
            setattr(owner, attribute, good)


def _change_entry(change: Callable[[HistoryEntry], HistoryEntry]) -> tuple[object, str, Any]:
    good = rules._entry
    return rules, "_entry", lambda *given: change(good(*given))


def _without_rule(*dropped: rules.Rule) -> tuple[object, str, Any]:
    return rules, "RULES", tuple(rule for rule in rules.RULES if rule not in dropped)


def _with_rule(good: rules.Rule, bad: rules.Rule) -> tuple[object, str, Any]:
    return rules, "RULES", tuple(bad if rule is good else rule for rule in rules.RULES)


def number_skips() -> tuple[object, str, Any]:
    """Generation numbers have gaps."""

    def skip(entry: HistoryEntry) -> HistoryEntry:
        number = entry.generation.number
        return replace(entry, generation=replace(entry.generation, number=number + (number > 1)))

    return _change_entry(skip)


def drained_nodes_are_enlisted() -> tuple[object, str, Any]:
    """A node that leaves counts as ready."""
    good = Situation.see

    def see(self: Situation, record: NodeRecord, joined: Revision) -> None:
        good(self, record, joined)
        if record.phase is NodePhase.DRAINING:
            self.ready.add(record.node_id)

    return Situation, "see", see


def minimum_is_one() -> tuple[object, str, Any]:
    """The minimum is not waited for."""

    def wait(known: Situation, now: float) -> Decision | None:
        return None if known.ready else rules.wait_for_minimum(known, now)

    return _with_rule(rules.wait_for_minimum, wait)


def maximum_is_exceeded() -> tuple[object, str, Any]:
    """One node more than allowed gets in."""
    good = rules.choose_members

    def choose(
        previous: Iterable[NodeId],
        ready: Collection[NodeId],
        joined: Mapping[NodeId, Revision],
        *,
        limit: int,
    ) -> tuple[NodeId, ...]:
        return good(previous, ready, joined, limit=limit + 1)

    return rules, "choose_members", choose


def sizes_are_ignored() -> tuple[object, str, Any]:
    """Any number of nodes trains, whatever the job allows."""
    return Situation, "size", property(lambda known: min(known.limit, len(known.ready)))


def every_newcomer_is_a_change() -> tuple[object, str, Any]:
    """A ready node that makes up no larger size is followed by a generation without it."""

    def has_newcomers(known: Situation) -> bool:
        return len(known.members) < known.limit and len(known.ready) > len(known.standing.fit)

    return Situation, "has_newcomers", property(has_newcomers)


def slots_are_ignored() -> tuple[object, str, Any]:
    """Every node is taken for one with one slot."""
    good = rules.assign_ranks

    def assign(chosen: Sequence[NodeId], records: Mapping[NodeId, NodeRecord]) -> tuple[Member, ...]:
        return tuple(replace(member, first_rank=member.group_rank) for member in good(chosen, records))

    return rules, "assign_ranks", assign


def newcomers_come_first() -> tuple[object, str, Any]:
    """A joiner takes rank 0, and with it the source of the state."""
    good = rules.choose_members

    def choose(previous: Iterable[NodeId], *rest: Any, limit: int) -> tuple[NodeId, ...]:
        before = set(previous)
        chosen = good(before, *rest, limit=limit)
        return tuple(sorted(chosen, key=lambda node: node in before))

    return rules, "choose_members", choose


def survivors_are_sorted_by_name() -> tuple[object, str, Any]:
    """Survivors change places when one of them is lost."""
    good = rules.choose_members

    def choose(previous: Iterable[NodeId], *rest: Any, limit: int) -> tuple[NodeId, ...]:
        return good(sorted(previous, reverse=True), *rest, limit=limit)

    return rules, "choose_members", choose


def losses_spend_restarts() -> tuple[object, str, Any]:
    """A lost node eats the budget for failures."""

    def spend(entry: HistoryEntry) -> HistoryEntry:
        generation = entry.generation
        spent = generation.restart_count + (generation.cause is Cause.LOSS)
        return replace(entry, generation=replace(generation, restart_count=spent))

    return _change_entry(spend)


def failures_are_free() -> tuple[object, str, Any]:
    """The restart count never grows."""
    return _change_entry(lambda entry: replace(entry, generation=replace(entry.generation, restart_count=0)))


def failures_are_not_probed() -> tuple[object, str, Any]:
    """A broken collective is a failure, whoever is lost."""
    return _without_rule(rules.account_for_members)


def budget_is_ignored() -> tuple[object, str, Any]:
    """One restart more than the budget."""
    return _without_rule(rules.close_when_budget_is_spent)


def closed_is_forgotten() -> tuple[object, str, Any]:
    """A closed run goes on."""
    return _without_rule(rules.stay_closed)


def writes_overlap() -> tuple[object, str, Any]:
    """A second commit starts before the first has an outcome."""
    return _without_rule(rules.await_commit)


def failed_commits_are_not_read_back() -> tuple[object, str, Any]:
    """A commit without an answer is assumed not to have happened."""
    good = coordinator.Coordinator._apply

    def apply(self: coordinator.Coordinator, event: Any, now: float) -> None:
        if isinstance(event, CommitFailed):
            self._situation.publishing = None
            self._situation.closing = None
            return
        good(self, event, now)

    return coordinator.Coordinator, "_apply", apply


def successors_publish() -> tuple[object, str, Any]:
    """A take-over forgets who the members are."""
    good = Situation.__init__

    def begin(self: Situation, policy: Any, view: StoreView, now: float) -> None:
        good(self, policy, view, now)
        self.members = {}
        self._place_all()

    return Situation, "__init__", begin


def wake_ups_are_lost() -> tuple[object, str, Any]:
    """A wait sets no timer."""
    good = coordinator.Coordinator._next_wait

    def wait(self: coordinator.Coordinator, decision: Decision) -> list[Any]:
        return [command for command in good(self, decision) if not isinstance(command, WakeAt)]

    return coordinator.Coordinator, "_next_wait", wait


def last_call_never_ends() -> tuple[object, str, Any]:
    """Below the maximum it waits for ever, with a wake-up each time."""

    def settle(known: Situation, now: float) -> Decision | None:
        decision = rules.settle(known, now)
        if decision is None and not known.standing.intact and len(known.ready) < known.limit:
            return Decision(reason="last call", until=now + 1.0)
        return decision

    return _with_rule(rules.settle, settle)


def target_is_waited_for_by_last_call() -> tuple[object, str, Any]:
    """All that are expected are there, and a last call is waited for nevertheless."""

    def settle(known: Situation, now: float) -> Decision | None:
        if known.current is None and known.enough_since is not None:
            deadline = known.enough_since + known.policy.last_call
            return Decision(reason="last call", until=deadline) if now < deadline else None
        return rules.settle(known, now)

    return _with_rule(rules.settle, settle)


def silent_nodes_are_not_fenced() -> tuple[object, str, Any]:
    """A silent member is waited for until its lease ends by itself."""

    def fence(known: Situation, inquiry: situation.Inquiry, now: float) -> Decision:
        return Decision(reason="waiting for its lease to end", until=now + 1.0)

    return rules, "_fence", fence


def one_lost_packet_evicts() -> tuple[object, str, Any]:
    """A silent member is asked only once."""
    return rules, "PROBE_ROUNDS", 1


def late_coordinators_accuse() -> tuple[object, str, Any]:
    """Answers that lie unread behind an overdue timer do not count."""
    good = rules._question

    def question(known: Situation, inquiry: situation.Inquiry, now: float) -> Decision:
        is_over = now >= inquiry.deadline
        return rules._fence(known, inquiry, now) if is_over else good(known, inquiry, now)

    return rules, "_question", question


def drains_wait_for_the_node_to_leave() -> tuple[object, str, Any]:
    """A draining member is kept until it is gone."""
    good = rules.form_generation

    def form(known: Situation, now: float) -> Decision | None:
        is_only_drain = known.standing.draining and not known.standing.lost and not known.is_broken
        return None if is_only_drain else good(known, now)

    return _with_rule(good, form)


def old_failures_count() -> tuple[object, str, Any]:
    """A late report of an earlier generation fails the current one."""
    good = Situation.report

    def report(self: Situation, failure: Failure) -> None:
        good(self, replace(failure, generation=self.number))

    return Situation, "report", report


def finishing_runs_take_newcomers() -> tuple[object, str, Any]:
    """A node joins while the members end one after the other."""
    good = rules.let_the_rest_finish

    def finish(known: Situation, now: float) -> Decision | None:
        if known.standing.done and len(known.ready) > len(known.standing.fit) and known.size:
            return rules._publish(known, now)
        return good(known, now)

    return _with_rule(good, finish)


def one_finished_member_is_success() -> tuple[object, str, Any]:
    """The run is closed under members that still train."""

    def close(known: Situation, now: float) -> Decision | None:
        if known.standing.done:
            return rules.close_run(rules.Outcome.SUCCEEDED, 0, "one node finished")
        return None

    return _with_rule(rules.close_when_finished, close)


def stops_are_followed_by_generations() -> tuple[object, str, Any]:
    """Nodes that leave because of a stop are taken for losses."""
    return _without_rule(rules.close_when_stopped)


def unseen_nodes_are_forgotten() -> tuple[object, str, Any]:
    """Nodes that were asked for and not listed yet are launched again."""
    good = reconciliation._count
    return reconciliation, "_count", lambda *given: replace(good(*given), pending=0)


def members_are_surplus() -> tuple[object, str, Any]:
    """A smaller plan ends nodes that train."""
    good = reconciliation._remove
    return reconciliation, "_remove", lambda surplus, count, _members: good(surplus, count, ())


MUTANTS = (
    Mutant(name="number-skips", breaks="S1", plant=number_skips),
    Mutant(name="drained-nodes-are-enlisted", breaks="S2", plant=drained_nodes_are_enlisted),
    Mutant(name="one-lost-packet-evicts", breaks="S2", plant=one_lost_packet_evicts),
    Mutant(name="late-coordinators-accuse", breaks="S2", plant=late_coordinators_accuse),
    Mutant(name="minimum-is-one", breaks="S3", plant=minimum_is_one),
    Mutant(name="maximum-is-exceeded", breaks="S3", plant=maximum_is_exceeded),
    Mutant(name="sizes-are-ignored", breaks="S3", plant=sizes_are_ignored),
    Mutant(name="every-newcomer-is-a-change", breaks="S8", plant=every_newcomer_is_a_change),
    Mutant(name="slots-are-ignored", breaks="S4", plant=slots_are_ignored),
    Mutant(name="failed-commits-are-not-read-back", breaks="S5", plant=failed_commits_are_not_read_back),
    Mutant(name="writes-overlap", breaks="S5", plant=writes_overlap),
    Mutant(name="newcomers-come-first", breaks="S7", plant=newcomers_come_first),
    Mutant(name="survivors-are-sorted-by-name", breaks="S7", plant=survivors_are_sorted_by_name),
    Mutant(name="old-failures-count", breaks="S8", plant=old_failures_count),
    Mutant(name="finishing-runs-take-newcomers", breaks="S8", plant=finishing_runs_take_newcomers),
    Mutant(name="losses-spend-restarts", breaks="S9", plant=losses_spend_restarts),
    Mutant(name="failures-are-free", breaks="S9", plant=failures_are_free),
    Mutant(name="failures-are-not-probed", breaks="S9", plant=failures_are_not_probed),
    Mutant(name="budget-is-ignored", breaks="S9", plant=budget_is_ignored),
    Mutant(name="closed-is-forgotten", breaks="S10", plant=closed_is_forgotten),
    Mutant(name="one-finished-member-is-success", breaks="S10", plant=one_finished_member_is_success),
    Mutant(name="last-call-never-ends", breaks="L1", plant=last_call_never_ends),
    Mutant(name="target-is-waited-for-by-last-call", breaks="L1", plant=target_is_waited_for_by_last_call),
    Mutant(name="stops-are-followed-by-generations", breaks="L1", plant=stops_are_followed_by_generations),
    Mutant(name="wake-ups-are-lost", breaks="L2", plant=wake_ups_are_lost),
    Mutant(name="silent-nodes-are-not-fenced", breaks="L3", plant=silent_nodes_are_not_fenced),
    Mutant(name="successors-publish", breaks="L4", plant=successors_publish),
    Mutant(name="drains-wait-for-the-node-to-leave", breaks="L5", plant=drains_wait_for_the_node_to_leave),
    Mutant(
        name="unseen-nodes-are-forgotten", breaks="S11", plant=unseen_nodes_are_forgotten, is_planning=True
    ),
    Mutant(name="members-are-surplus", breaks="planning", plant=members_are_surplus, is_planning=True),
)
