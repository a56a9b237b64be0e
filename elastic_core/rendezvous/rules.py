"""The coordinator's decisions: ordered rules, each a pure function, the first that speaks wins.

A rule reads the situation and returns a decision with its reason, or None where it
has nothing to say. Deadlines are stored points in time that are compared, never
differences, so that a wake-up at a deadline always finds it reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure, bound
from elastic_core.model.membership import Cause, Closed, Generation, Outcome
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.events import (
    CloseRun,
    CoordinatorCommand,
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
MAX_PAUSE: Final = 5.0
"""Longest pause between commits that the store keeps refusing."""
MAX_REASON: Final = 400
"""Characters of a reason: every node reads it with `current`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now and why; without commands it is a wait.

    Attributes:
        until: When to decide again if nothing happens; None: only a named event matters.
    """

    reason: str
    commands: tuple[CoordinatorCommand, ...] = ()
    until: float | None = None


Rule = Callable[[Situation, float], Decision | None]


def decide(situation: Situation, now: float) -> Decision:
    """Return the first decision of the ordered rules."""
    for rule in RULES:
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
        return Decision(reason=_closing(situation.closing))
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
        return _close(Outcome.SUCCEEDED, ExitCode.OK, f"{_nodes(count)} finished generation {number}")
    record = situation.nodes.get(situation.first)
    if record is None or record.generation >= number or situation.done_since is None:
        return None
    grace_end = situation.done_since + FINISH_GRACE
    if now >= grace_end:
        reason = f"rank 0 finished generation {record.generation} before generation {number} was entered"
        return _close(Outcome.SUCCEEDED, ExitCode.OK, reason)
    return Decision(reason=f"rank 0 finished, {running} of {_nodes(count)} are finishing", until=grace_end)


def close_when_stopped(situation: Situation, now: float) -> Decision | None:
    """After a stop form no generation; end the run when every member has left."""
    if situation.stop_reason is None:
        return None
    staying = len(situation.members) - len(situation.standing.left)
    if staying == 0:
        return _close(Outcome.PREEMPTED, ExitCode.PREEMPTED, f"stopped: {situation.stop_reason}")
    deadline = situation.stop_since + situation.policy.stop_timeout
    if now >= deadline:
        reason = (
            f"stopped: {situation.stop_reason}; {_nodes(staying)} did not leave within "
            f"{situation.policy.stop_timeout:g} s"
        )
        return _close(Outcome.PREEMPTED, ExitCode.PREEMPTED, reason)
    return Decision(reason=f"stopping: {_nodes(staying)} still to leave", until=deadline)


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


def close_when_unstartable(situation: Situation, now: float) -> Decision | None:
    """End at an exception before the first process group: every restart would meet it again."""
    if not _is_failure_due(situation):
        return None
    root = situation.root_cause()
    if root is None or not _is_hopeless(root):
        return None
    closing = _close_failed(root, "failed before training began, a restart cannot mend it")
    return _hear_the_others(situation, closing, now)


def close_when_budget_is_spent(situation: Situation, now: float) -> Decision | None:
    """End at the failure that the budget of restarts does not cover."""
    if not _is_failure_due(situation):
        return None
    failures = _restarts(situation) + 1
    if failures <= situation.policy.max_restarts:
        return None
    count = "1 failure" if failures == 1 else f"{failures} failures"
    closing = _close_failed(situation.root_cause(), f"{count}, budget {situation.policy.max_restarts}")
    return _hear_the_others(situation, closing, now)


def close_without_progress(situation: Situation, now: float) -> Decision | None:
    """End when failures follow each other without a new step between them."""
    if not _is_failure_due(situation) or _stalled(situation) < situation.policy.no_progress_limit:
        return None
    reason = (
        f"{_stalled(situation)} generations in a row failed without going beyond step "
        f"{situation.reached}: {_headline(situation)}"
    )
    return _hear_the_others(situation, _close(Outcome.NO_PROGRESS, ExitCode.NO_PROGRESS, reason), now)


# ---- the next generation ---------------------------------------------------------------------


def let_the_rest_finish(situation: Situation, _now: float) -> Decision | None:
    """Change nothing while members finish one after the other."""
    standing = situation.standing
    if not standing.done or situation.is_broken or standing.lost or standing.unfit:
        return None
    done, count = len(standing.done), len(situation.members)
    return Decision(reason=f"{done} of {_nodes(count)} finished generation {situation.number}")


def wait_for_minimum(situation: Situation, now: float) -> Decision | None:
    """Never form a generation below the minimum; give up at the join timeout."""
    needed, ready = situation.least, len(situation.ready)
    if situation.due_since is None or ready >= needed:
        return None
    deadline = max(situation.due_since, situation.short_since) + situation.policy.join_timeout
    done = len(situation.standing.done)
    finished = f"; {_nodes(done)} {'has' if done == 1 else 'have'} finished already" if done else ""
    if now >= deadline:
        reason = (
            f"{ready} of {_nodes(needed)} were ready within the join timeout of "
            f"{situation.policy.join_timeout:g} s{finished}"
        )
        return _close(Outcome.BELOW_MINIMUM, ExitCode.BELOW_MINIMUM, reason)
    sizes = situation.policy.sizes
    allowed = "" if sizes.are_all else f" (allowed: {sizes.describe()})"
    timeout = f"(timeout {situation.policy.join_timeout:g} s)"
    reason = f"{ready} of {_nodes(needed)}{allowed}, waiting {timeout}{finished}"
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
    return Decision(reason=f"{ready} of {_nodes(expected)} are ready, last call for more", until=deadline)


def let_members_enter(situation: Situation, now: float) -> Decision | None:
    """Publish no planned change over a generation that its members have not entered yet."""
    if situation.current is None or situation.is_broken or situation.is_explained:
        return None
    entered, count = len(situation.standing.entered), len(situation.members)
    deadline = situation.formed_since + situation.policy.last_call
    if not situation.is_change_planned or entered >= count or now >= deadline:
        return None
    reason = f"generation {situation.number} is forming ({entered} of {_nodes(count)} entered)"
    return Decision(reason=f"{reason}, the next change waits", until=deadline)


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
    close_when_unstartable,
    close_when_budget_is_spent,
    close_without_progress,
    let_the_rest_finish,
    wait_for_minimum,
    settle,
    let_members_enter,
    form_generation,
)


def _rest(situation: Situation) -> Decision:
    trains = f"generation {situation.number} trains on {_nodes(len(situation.members))}"
    standby = len(situation.ready) - len(situation.standing.fit)
    return Decision(reason=f"{trains}, {standby} standing by" if standby else trains)


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"


def _some(names: Iterable[NodeId]) -> str:
    shown = sorted(names)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more


def _close(outcome: Outcome, exit_code: int, reason: str) -> Decision:
    closed = Closed(outcome=outcome, exit_code=int(exit_code), reason=bound(reason, MAX_REASON))
    return Decision(reason=_closing(closed), commands=(CloseRun(closed=closed),))


def _closing(closed: Closed) -> str:
    return f"closing ({closed.outcome}): {closed.reason}"


def _close_failed(root: Failure | None, why: str) -> Decision:
    exit_code = root.exit_code if root is not None else 0
    cause = root.headline() if root is not None else "workers failed on living nodes and said no reason"
    return _close(Outcome.FAILED, exit_code or ExitCode.FAILED, f"{why}: {cause}")


def _hear_the_others(situation: Situation, closing: Decision, now: float) -> Decision:
    """Return the end, but not before the others said what it did to them: agents act on it at once."""
    inquiry = situation.inquiry
    unheard = sum(1 for _ in situation.unheard())
    if inquiry is None or not unheard or now >= inquiry.opened_at + HEARING:
        return closing
    reason = f"{_nodes(unheard)} may still say what that did there; then {closing.reason}"
    return Decision(reason=reason, until=inquiry.opened_at + HEARING)


def _is_hopeless(failure: Failure) -> bool:
    """Whether a worker raised before it ever formed a group; a signal may be chance."""
    return not failure.started and not failure.consequence and failure.exit_code < 128


def _is_failure_due(situation: Situation) -> bool:
    """Whether the current generation ended by a failure that no change of its members explains."""
    return bool(situation.standing.reported) and not situation.is_explained


def _headline(situation: Situation) -> str:
    root = situation.root_cause()
    return root.headline() if root is not None else "collectives broke while all members lived"


def _question(situation: Situation, inquiry: Inquiry, now: float) -> Decision:
    """Ask round after round, then fence; who is late with looking at the answers asks once more.

    After a pause of the coordinator's own (a busy machine, a frozen one) the answers may lie unread
    behind the timer that rings first: that silence proves nothing.
    """
    pause = situation.policy.probe_timeout / PROBE_ROUNDS
    answers_due = inquiry.asked_at + pause
    silent = len(inquiry.silent)
    reason = f"generation {situation.number} broke: waiting for a sign of life of {_nodes(silent)}"
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
    return Decision(reason=f"fencing {_nodes(len(inquiry.silent))} {why}", commands=commands, until=until)


def _restarts(situation: Situation) -> int:
    return situation.current.restart_count if situation.current is not None else 0


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
        return Cause.START, f"{_nodes(ready)} {'is' if ready == 1 else 'are'} ready"
    if standing.crashed or standing.unfit:
        gone = standing.crashed | standing.unfit
        fates = sorted({situation.fate(node) for node in gone})
        return Cause.LOSS, f"lost {_some(gone)} ({', '.join(fates[:3])})"
    if standing.lost or standing.draining:
        left = standing.lost | standing.draining
        notices = sorted({situation.fate(node) for node in left} - {DRAINED})
        why = (
            f" ({', '.join(notice.removeprefix(f'{DRAINED}: ') for notice in notices[:3])})"
            if notices
            else ""
        )
        return Cause.DRAIN, f"drained {_some(left)}{why}"
    if standing.reported:
        return Cause.FAILURE, _headline(situation)
    if len(situation.members) > situation.limit:
        return Cause.RESCALE, f"the target is {_nodes(situation.limit)}"
    return Cause.JOIN, f"joined {_some(set(chosen).difference(situation.members))}"


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
            restart_count=_restarts(situation) + is_failure,
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
