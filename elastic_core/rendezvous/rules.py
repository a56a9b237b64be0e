"""The coordinator's decisions: ordered rules, each a pure function, the first that speaks wins.

A rule reads the situation and returns a decision with its reason, or None where it
has nothing to say. Deadlines are stored points in time that are compared, never
differences, so that a wake-up at a deadline always finds it reached.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure, bound
from elastic_core.model.membership import Cause, Generation, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.decision import (
    MAX_REASON,
    Decision,
    close_run,
    describe_end,
    name_some,
    nodes_of,
)
from elastic_core.rendezvous.events import (
    FenceNode,
    ProbeNodes,
    PublishGeneration,
)
from elastic_core.rendezvous.ranks import assign_ranks, assignments_of, choose_members
from elastic_core.rendezvous.situation import DRAINED, Inquiry, Situation

PROBE_ROUNDS: Final = 3
"""Times that a silent member is asked within `probe_timeout`: a lost packet is no lost node."""
FENCE_RETRY: Final = 1.0
FINISH_GRACE: Final = 5.0
"""For members that finished a generation late, when the one after it can never be entered."""
HEARING: Final = 1.0
"""How long a run that ends by a failure waits to hear what the failure did to the other members."""
ABLE: Final = (NodePhase.READY, NodePhase.WARMING)
"""Phases of nodes that train, or will be able to."""
HOUR: Final = 3600.0
JOIN_SPACING: Final = 20.0
"""Joins take at most one part in so many of the time, whatever a generation costs this run."""
MAX_PAUSE: Final = 5.0
"""Longest pause between commits that the store keeps refusing."""


Rule = Callable[[Situation, float], Decision | None]


def decide(situation: Situation, now: float) -> Decision:
    """Return the first decision of the ordered rules; at rest none of them has anything to say."""
    for rule in () if situation.is_at_rest else RULES:
        decision = rule(situation, now)
        if decision is not None:
            return decision
    return _rest(situation)


# ---- writes in flight, and the end -----------------------------------------------------------


def stay_closed(situation: Situation, _now: float) -> Decision | None:
    """Closed stays closed."""
    closed = situation.closed
    if closed is None:
        return None
    return Decision(reason=f"the run is closed ({closed.outcome}): {closed.reason}")


def await_commit(situation: Situation, _now: float) -> Decision | None:
    """Decide nothing while a write has no outcome yet."""
    if situation.publishing is not None:
        return Decision(reason=f"generation {situation.publishing.generation.number} is being written")
    if situation.closing is not None:
        return Decision(reason=describe_end(situation.closing))
    return None


def pause_after_refusals(situation: Situation, now: float) -> Decision | None:
    """Slow down when the store refuses commit after commit."""
    if situation.refusals < 2:
        return None
    pause_end = situation.refused_at + min(0.1 * 2.0 ** min(situation.refusals - 2, 10), MAX_PAUSE)
    if now >= pause_end:
        return None
    return Decision(reason=f"{situation.refusals} commits in a row were refused: pausing", until=pause_end)


def close_when_finished(situation: Situation, now: float) -> Decision | None:
    """Succeed when all members did; rank 0's node must be among them, the others may be lost."""
    standing = situation.standing
    if not standing.done or situation.first not in standing.done:
        return None
    running = len(situation.members) - len(standing.done) - len(standing.lost)
    number, count = situation.number, len(situation.members)
    if running == 0:
        return close_run(Outcome.SUCCEEDED, ExitCode.OK, f"{nodes_of(count)} finished generation {number}")
    record = situation.nodes.get(situation.first)
    if record is None or record.generation >= number or situation.done_since is None:
        return None
    grace_end = situation.done_since + FINISH_GRACE
    if now >= grace_end:
        reason = f"rank 0 finished generation {record.generation} before generation {number} was entered"
        return close_run(Outcome.SUCCEEDED, ExitCode.OK, reason)
    return Decision(reason=f"rank 0 finished, {running} of {nodes_of(count)} are finishing", until=grace_end)


def close_when_stopped(situation: Situation, now: float) -> Decision | None:
    """After a stop form no generation; end the run when every member has left."""
    if situation.stop_reason is None:
        return None
    staying = len(situation.members) - len(situation.standing.left)
    if staying == 0:
        return close_run(Outcome.PREEMPTED, ExitCode.PREEMPTED, f"stopped: {situation.stop_reason}")
    deadline = situation.stop_since + situation.policy.stop_timeout
    if now >= deadline:
        reason = (
            f"stopped: {situation.stop_reason}; {nodes_of(staying)} did not leave within "
            f"{situation.policy.stop_timeout:g} s"
        )
        return close_run(Outcome.PREEMPTED, ExitCode.PREEMPTED, reason)
    return Decision(reason=f"stopping: {nodes_of(staying)} still to leave", until=deadline)


# ---- failures --------------------------------------------------------------------------------


def close_when_set_up_fails(situation: Situation, _now: float) -> Decision | None:
    """Before the first generation there is no loss to explain a failure of the workers' set-up."""
    if situation.current is not None:
        return None
    failures = [failure for failure in situation.failures if not failure.consequence]
    hopeless = next((failure for failure in failures if _is_hopeless(failure)), None)
    if hopeless is not None:
        return _close_failed(hopeless, "set-up failed, a restart cannot mend it")
    if len(failures) > situation.policy.max_restarts:
        return _close_failed(failures[0], f"set-up failed {len(failures)} times")
    return None


def account_for_members(situation: Situation, now: float) -> Decision | None:
    """When a generation broke, ask the silent members, and fence those who do not answer.

    A survivor's collectives fail long before the lease of a lost node ends. Only when every
    member is known to live, or known to be gone, can a loss be told from a failure.
    """
    inquiry = situation.inquiry
    if inquiry is None:
        return None
    if inquiry.silent:
        return _question(situation, inquiry, now)
    if not situation.is_explained and situation.root_cause() is None and now < inquiry.deadline:
        return Decision(
            reason=f"generation {situation.number} broke, its members live: waiting for the root cause",
            until=inquiry.deadline,
        )
    return None


def close_when_partly_finished(situation: Situation, now: float) -> Decision | None:
    """End when members finished under others that failed, and too few are left to go on without them.

    Those that finished never train again and their nodes live, so that nobody launches others. After a
    loss others may come.
    """
    standing = situation.standing
    if not standing.done or not standing.reported or standing.lost:
        return None
    able = sum(record.phase in ABLE for record in situation.nodes.values())
    if able >= situation.least:
        return None
    root = situation.root_cause()
    why = f": {root.headline()}" if root is not None else ""
    reason = f"{situation.partly_finished()} trained, a restart cannot mend it{why}"
    exit_code = root.exit_code if root is not None else 0
    closing = close_run(Outcome.FAILED, exit_code or ExitCode.FAILED, reason)
    return _hear_the_others(situation, closing, now)


def close_when_unstartable(situation: Situation, now: float) -> Decision | None:
    """End at an exception before the first process group: every restart would meet it again."""
    if not situation.is_failure_due:
        return None
    root = situation.root_cause()
    if root is None or not _is_hopeless(root):
        return None
    closing = _close_failed(root, "failed before training began, a restart cannot mend it")
    return _hear_the_others(situation, closing, now)


def close_when_budget_is_spent(situation: Situation, now: float) -> Decision | None:
    """End at the failure that the budget of restarts does not cover."""
    if not situation.is_failure_due:
        return None
    failures = situation.restarts + 1
    if failures <= situation.policy.max_restarts:
        return None
    count = "1 failure" if failures == 1 else f"{failures} failures"
    closing = _close_failed(situation.root_cause(), f"{count}, budget {situation.policy.max_restarts}")
    return _hear_the_others(situation, closing, now)


def close_without_progress(situation: Situation, now: float) -> Decision | None:
    """End when failures follow each other without a new step between them."""
    if not situation.is_failure_due or _stalled(situation) < situation.policy.no_progress_limit:
        return None
    reason = (
        f"{_stalled(situation)} generations in a row failed without going beyond step "
        f"{situation.reached}: {_headline(situation)}"
    )
    return _hear_the_others(situation, close_run(Outcome.NO_PROGRESS, ExitCode.NO_PROGRESS, reason), now)


# ---- the next generation ---------------------------------------------------------------------


def let_the_rest_finish(situation: Situation, now: float) -> Decision | None:
    """Change nothing while members finish one after the other; give up on those that never do."""
    standing = situation.standing
    if not standing.done or situation.is_broken or standing.lost or standing.unfit:
        return None
    patience = situation.policy.partial_exit
    deadline = (now if situation.done_since is None else situation.done_since) + patience
    if now >= deadline:
        reason = f"{situation.partly_finished()} runs {patience:g} s later, a restart cannot mend it"
        return close_run(Outcome.FAILED, ExitCode.FAILED, reason)
    done, count = len(standing.done), len(situation.members)
    reason = f"{done} of {nodes_of(count)} finished generation {situation.number}"
    return Decision(reason=reason, until=deadline)


def wait_for_minimum(situation: Situation, now: float) -> Decision | None:
    """Never form a generation below the minimum; give up at the join timeout."""
    needed, ready = situation.least, len(situation.ready)
    if situation.due_since is None or ready >= needed:
        return None
    deadline = max(situation.due_since, situation.short_since) + situation.policy.join_timeout
    done = len(situation.standing.done)
    finished = f"; {nodes_of(done)} {'has' if done == 1 else 'have'} finished already" if done else ""
    if now >= deadline:
        reason = (
            f"{ready} of {nodes_of(needed)} were ready within the join timeout of "
            f"{situation.policy.join_timeout:g} s{finished}"
        )
        return close_run(Outcome.BELOW_MINIMUM, ExitCode.BELOW_MINIMUM, reason)
    sizes = situation.policy.sizes
    allowed = "" if sizes.are_all else f" (allowed: {sizes.describe()})"
    timeout = f"(timeout {situation.policy.join_timeout:g} s)"
    reason = f"{ready} of {nodes_of(needed)}{allowed}, waiting {timeout}{finished}"
    return Decision(reason=reason, until=deadline)


def settle(situation: Situation, now: float) -> Decision | None:
    """While no node trains, wait a last call for more, unless all that are expected are ready."""
    if situation.due_since is None or situation.enough_since is None or situation.standing.intact:
        return None
    standing = situation.standing
    away = len(standing.lost) + len(standing.draining) + len(standing.done)
    present = len(situation.members) - away
    expected = situation.policy.sizes.largest_within(min(situation.limit, present or situation.limit))
    deadline = max(situation.due_since, situation.enough_since) + situation.policy.last_call
    if len(situation.ready) >= expected or now >= deadline:
        return None
    ready = len(situation.ready)
    return Decision(reason=f"{ready} of {nodes_of(expected)} are ready, last call for more", until=deadline)


def let_the_last_save(situation: Situation, now: float) -> Decision | None:
    """Form nothing beside members that all leave: nobody would carry their state on.

    Left alone they save and leave; what follows goes on from there. A generation that was formed before
    would refuse their checkpoint, as it refuses every older one.
    """
    standing = situation.standing
    staying = standing.draining - standing.left
    if not staying or standing.fit or situation.is_broken or situation.due_since is None:
        return None
    deadline = situation.due_since + situation.policy.stop_timeout
    if now >= deadline:
        return None
    return Decision(reason=f"the last members save and leave: {name_some(staying)}", until=deadline)


def let_members_enter(situation: Situation, now: float) -> Decision | None:
    """Publish no planned change over a generation that its members have not entered yet."""
    if situation.current is None or situation.is_broken or situation.is_explained:
        return None
    entered, count = len(situation.standing.entered), len(situation.members)
    deadline = situation.formed_since + situation.policy.last_call
    if not situation.is_change_planned or entered >= count or now >= deadline:
        return None
    reason = f"generation {situation.number} is forming ({entered} of {nodes_of(count)} entered)"
    return Decision(reason=f"{reason}, the next change waits", until=deadline)


def space_out_joins(situation: Situation, now: float) -> Decision | None:
    """After a join let newcomers wait for each other: joins take a twentieth of the time at most."""
    if situation.current is None or situation.current.cause is not Cause.JOIN:
        return None
    if situation.is_broken or situation.is_explained or not situation.has_newcomers:
        return None
    pause = min(JOIN_SPACING * situation.forming, situation.policy.last_call)
    deadline = situation.formed_since + pause
    if now >= deadline:
        return None
    newcomers = len(situation.ready) - len(situation.standing.fit)
    reason = f"{nodes_of(newcomers)} to join generation {situation.number}, with others that may come soon"
    return Decision(reason=reason, until=deadline)


def close_when_unsteady(situation: Situation, now: float) -> Decision | None:
    """End when members came and went more often than the job allows."""
    limit, changes = situation.policy.changes_per_hour, situation.changes
    is_change = situation.is_explained or situation.has_newcomers
    if not limit or len(changes) < limit or not is_change or changes[0] <= now - HOUR:
        return None
    reason = (
        f"unsteady: nodes came or went more than {limit} times within an hour; find out why, or raise "
        f"nodes.changes_per_hour"
    )
    return close_run(Outcome.FAILED, ExitCode.FAILED, reason)


def form_generation(situation: Situation, now: float) -> Decision | None:
    """Publish what is due: all reasons to wait are past."""
    return _publish(situation, now) if situation.is_change_due else None


RULES: Final[tuple[Rule, ...]] = (
    stay_closed,
    await_commit,
    pause_after_refusals,
    close_when_finished,
    close_when_stopped,
    close_when_set_up_fails,
    account_for_members,
    close_when_partly_finished,
    close_when_unstartable,
    close_when_budget_is_spent,
    close_without_progress,
    let_the_rest_finish,
    wait_for_minimum,
    settle,
    let_the_last_save,
    let_members_enter,
    space_out_joins,
    close_when_unsteady,
    form_generation,
)


def _rest(situation: Situation) -> Decision:
    trains = f"generation {situation.number} trains on {nodes_of(len(situation.members))}"
    standby = len(situation.ready) - len(situation.standing.fit)
    return Decision(reason=f"{trains}, {standby} standing by" if standby else trains)


def _close_failed(root: Failure | None, why: str) -> Decision:
    exit_code = root.exit_code if root is not None else 0
    cause = root.headline() if root is not None else "workers failed on living nodes and said no reason"
    return close_run(Outcome.FAILED, exit_code or ExitCode.FAILED, f"{why}: {cause}")


def _hear_the_others(situation: Situation, closing: Decision, now: float) -> Decision:
    """Return the end, but not before the others said what it did to them: agents act on it at once."""
    inquiry = situation.inquiry
    unheard = sum(1 for _ in situation.unheard())
    if inquiry is None or not unheard or now >= inquiry.opened_at + HEARING:
        return closing
    reason = f"{nodes_of(unheard)} may still say what that did there; then {closing.reason}"
    return Decision(reason=reason, until=inquiry.opened_at + HEARING)


def _is_hopeless(failure: Failure) -> bool:
    """Whether a worker raised before it ever formed a group; a signal may be chance."""
    return not failure.started and not failure.consequence and failure.exit_code < 128


def _headline(situation: Situation) -> str:
    root = situation.root_cause()
    if root is not None:
        return root.headline()
    if situation.standing.done:
        return f"{situation.partly_finished()} trained"
    return "collectives broke while all members lived"


def _question(situation: Situation, inquiry: Inquiry, now: float) -> Decision:
    """Ask round after round, then fence; who is late with looking at the answers asks once more.

    After a pause of the coordinator's own (a busy machine, a frozen one) the answers may lie unread
    behind the timer that rings first: that silence proves nothing.
    """
    pause = situation.policy.probe_timeout / PROBE_ROUNDS
    answers_due = inquiry.asked_at + pause
    silent = len(inquiry.silent)
    reason = f"generation {situation.number} broke: waiting for a sign of life of {nodes_of(silent)}"
    if inquiry.rounds and now < answers_due:
        return Decision(reason=reason, until=answers_due)
    is_late = now > answers_due + pause
    if not situation.fenced and (inquiry.rounds < PROBE_ROUNDS or is_late):
        probe = ProbeNodes(nodes=tuple(sorted(inquiry.silent)))
        return Decision(reason=reason, commands=(probe,), until=now + pause)
    return _fence(situation, inquiry, now)


def _fence(situation: Situation, inquiry: Inquiry, now: float) -> Decision:
    why = f"silent for {situation.policy.probe_timeout:g} s"
    asked = situation.fenced
    due = [node for node in sorted(inquiry.silent) if node not in asked or now >= asked[node] + FENCE_RETRY]
    commands = tuple(FenceNode(node_id=node, lease=situation.nodes[node].lease, reason=why) for node in due)
    patient = (asked[node] + FENCE_RETRY for node in inquiry.silent.difference(due))
    until = now + FENCE_RETRY if due else min(patient)
    return Decision(reason=f"fencing {nodes_of(len(inquiry.silent))} {why}", commands=commands, until=until)


def _stalled(situation: Situation) -> int:
    """Count the failed generations in a row without a new step, the current one included.

    Where nobody ever reported a step (a script that only knows torchrun), nothing is known of
    progress, and only the budget of restarts ends the run.
    """
    entry, root = situation.entry, situation.root_cause()
    is_known = situation.reached > 0 or (root is not None and root.step >= 0)
    if entry is None or not is_known or situation.reached > entry.step:
        return 0
    return entry.stalled + 1


def _publish(situation: Situation, now: float) -> Decision:
    chosen = choose_members(situation.members, situation.ready, situation.joined, limit=situation.size)
    entry = _entry(situation, chosen, now)
    number = entry.generation.number
    command = PublishGeneration(
        entry=entry,
        assignments=assignments_of(number, entry.members),
        based_on=situation.current_revision,
    )
    return Decision(reason=f"generation {number} is being written", commands=(command,))


def _cause(situation: Situation, chosen: tuple[NodeId, ...]) -> tuple[Cause, str]:
    """Return why a generation is due, and the sentence that says it."""
    standing = situation.standing
    if situation.current is None:
        ready = len(situation.ready)
        return Cause.START, f"{nodes_of(ready)} {'is' if ready == 1 else 'are'} ready"
    if standing.crashed or standing.unfit:
        gone = standing.crashed | standing.unfit
        fates = sorted({situation.fate(node) for node in gone})
        return Cause.LOSS, f"lost {name_some(gone)} ({', '.join(fates[:3])})"
    if standing.lost or standing.draining:
        left = standing.lost | standing.draining
        notices = sorted({situation.fate(node) for node in left} - {DRAINED})
        why = (
            f" ({', '.join(notice.removeprefix(f'{DRAINED}: ') for notice in notices[:3])})"
            if notices
            else ""
        )
        return Cause.DRAIN, f"drained {name_some(left)}{why}"
    if standing.reported:
        return Cause.FAILURE, _headline(situation)
    if len(situation.members) > situation.limit:
        return Cause.RESCALE, f"the target is {nodes_of(situation.limit)}"
    return Cause.JOIN, f"joined {name_some(set(chosen).difference(situation.members))}"


def _entry(situation: Situation, chosen: tuple[NodeId, ...], now: float) -> HistoryEntry:
    cause, why = _cause(situation, chosen)
    members = assign_ranks(chosen, situation.nodes)
    first = situation.nodes[chosen[0]]
    staying = set(chosen)
    is_failure = cause is Cause.FAILURE
    before = situation.entry
    reached = max(situation.reached, before.step if before else 0)
    carried = before.stalled if before and reached <= before.step else 0
    return HistoryEntry(
        generation=Generation(
            number=situation.number + 1,
            cause=cause,
            restart_count=situation.restarts + is_failure,
            world_size=sum(member.slots for member in members),
            group_world_size=len(members),
            master_address=first.address,
            master_port=first.master_port,
            reason=bound(why, MAX_REASON),
        ),
        members=members,
        lost={node: situation.fate(node) for node in situation.members if node not in staying},
        detected_at=now if situation.due_since is None else situation.due_since,
        published_at=now,
        step=reached,
        stalled=_stalled(situation) if is_failure else carried,
    )
