"""Desired nodes against observed ones: what to launch, what to end, or why to hold.

`reconcile` is pure and may be called at every tick. The caller performs the actions
and keeps the log:

    log = log.noticed(observed)
    for action in reconcile(plan, observed, log=log, members=members, now=now):
        match action:
            case Launch(record=record):
                log = log.asked(record)
                log = log.answered(record.token, provider.launch(...))  # not if it gave no answer
            case Terminate(names=names): provider.terminate(run, names)
            case Hold(reason=reason): say(reason)
            case GiveUp(): ...

Counting is done with what was asked and not seen yet, so that no delay of the
provider's lists can launch a node twice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.exits import ExitCode
from elastic_core.planning.launches import LaunchLog, LaunchRecord
from elastic_core.planning.plan import ClusterPlan

HOUR: Final = 3600.0
PATIENCE: Final = 180.0
"""A node that was granted and is not listed after so long will not come."""
FIRST_PAUSE: Final = 2.0
LONGEST_PAUSE: Final = 60.0
ALL_UNFIT: Final = 3
"""Where so many nodes failed their pre-flight checks and no other one was ever there, more would."""
CALM: Final = 600.0
"""Replacements further back than this do not slow down the next one."""

_ALIVE: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Launch nodes.

    Attributes:
        record: To be noted in the log before the call.
    """

    record: LaunchRecord
    reason: str

    @property
    def count(self) -> int:
        """Nodes to launch."""
        return self.record.count

    @property
    def token(self) -> str:
        """What makes the call idempotent."""
        return self.record.token


@dataclass(frozen=True, slots=True, kw_only=True)
class Terminate:
    """End these instances."""

    names: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hold:
    """Something is not as planned, and nothing can be done before `until` (None: before a change)."""

    reason: str
    until: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GiveUp:
    """No node lives, and launching more would not help: the run should end with this exit code."""

    exit_code: int
    reason: str


NodeAction = Launch | Terminate | Hold | GiveUp


@dataclass(frozen=True, slots=True)
class _Count:
    """Plan and world, counted once.

    Attributes:
        staying: Living instances that the plan does not release.
        leaving: Living instances that it does.
        pending: Asked for and not listed yet.
    """

    staying: tuple[Instance, ...]
    leaving: tuple[Instance, ...]
    ended: tuple[Instance, ...]
    pending: int


def reconcile(
    plan: ClusterPlan,
    observed: Sequence[Instance],
    *,
    log: LaunchLog,
    members: Collection[str],
    now: float,
) -> tuple[NodeAction, ...]:
    """Return what brings the observed nodes to the plan, in order.

    Args:
        plan: What the run shall have.
        observed: Everything that the provider lists, ended instances included.
        log: Launches so far, after `noticed(observed)`.
        members: Instances whose nodes are in the current generation: never ended unless the plan
            releases them by name.
        now: Monotonic seconds, on the clock of the log.
    """
    count = _count(plan, observed, log, now)
    actions: list[NodeAction] = []
    if count.leaving:
        names = tuple(instance.name for instance in count.leaving)
        actions.append(Terminate(names=names, reason="the plan releases them"))
    missing = plan.wanted - len(count.staying) - count.pending
    if missing > 0 and not _is_over(observed):
        actions.append(_add(plan, count, log, now))
    # Nodes that may still come are no reason to end one that is there: an answer that was lost
    # counts them twice until the call was repeated.
    elif (surplus := len(count.staying) - plan.wanted) > 0:
        actions += _remove(surplus, count, members)
    return (*actions, *_ask_again(log, now))


def _is_over(observed: Sequence[Instance]) -> bool:
    """Return whether an agent ended with 0: that says the run is closed, even before the store tells us."""
    return any(one.state is InstanceState.ENDED and one.exit_code == ExitCode.OK for one in observed)


def _count(plan: ClusterPlan, observed: Sequence[Instance], log: LaunchLog, now: float) -> _Count:
    alive = [instance for instance in observed if instance.state in _ALIVE]
    return _Count(
        staying=tuple(instance for instance in alive if instance.name not in plan.release),
        leaving=tuple(instance for instance in alive if instance.name in plan.release),
        ended=tuple(instance for instance in observed if instance.state is InstanceState.ENDED),
        pending=sum(record.pending(now, PATIENCE) for record in log.records),
    )


def _add(plan: ClusterPlan, count: _Count, log: LaunchLog, now: float) -> NodeAction:
    """Grow at once; replace what was lost with pauses, within the hour's allowance."""
    present = len(count.staying) + count.pending
    refused = next((ended for ended in count.ended if ended.exit_code == ExitCode.REFUSED), None)
    if refused is not None and present == 0:
        detail = refused.detail or "see its log"
        reason = f"the agent on {refused.name} refused its input ({detail}): another one would too"
        return GiveUp(exit_code=int(ExitCode.REFUSED), reason=reason)
    unfit = [ended for ended in count.ended if ended.exit_code == ExitCode.UNFIT]
    if present == 0 and len(unfit) == len(count.ended) >= ALL_UNFIT:
        last = f"the last one, {unfit[-1].name}: {unfit[-1].detail or 'see its log'}"
        reason = f"{_nodes(len(unfit))} were launched and not one was fit; {last}"
        return GiveUp(exit_code=int(ExitCode.UNFIT), reason=reason)
    missing = min(plan.wanted - present, plan.most - present - len(count.leaving))
    if missing <= 0:
        return Hold(reason=f"{_nodes(len(count.leaving))} must end before others are launched")
    grown = min(missing, _growth(plan, count, log))
    lost = missing - grown
    obstacle = _obstacle(plan, count, log, now) if lost else None
    if obstacle is not None:
        if not grown:
            return obstacle
        lost = 0
    lost = min(lost, _allowance(plan, log, now))
    record = LaunchRecord(
        token=log.next_token(), count=grown + lost, lost=lost, wanted=plan.wanted, asked_at=now
    )
    return Launch(record=record, reason=_why(plan, grown, lost))


def _growth(plan: ClusterPlan, count: _Count, log: LaunchLog) -> int:
    """Return by how much the plan outgrew all that was there or asked for before."""
    known = len(count.staying) + len(count.leaving) + len(count.ended) if not log.records else 0
    return max(plan.wanted - max([known, *(record.wanted for record in log.records)]), 0)


def _allowance(plan: ClusterPlan, log: LaunchLog, now: float) -> int:
    return plan.replacements_per_hour - sum(record.spent for record in log.lost_since(now - HOUR))


def _obstacle(plan: ClusterPlan, count: _Count, log: LaunchLog, now: float) -> NodeAction | None:
    """Return why lost nodes must not be replaced now."""
    if _allowance(plan, log, now) <= 0:
        return _exhausted(plan, count, log, now)
    recent = log.lost_since(now - CALM)
    if not recent:
        return None
    pause = min(FIRST_PAUSE * 2.0 ** (len(recent) - 1), LONGEST_PAUSE)
    until = recent[-1].asked_at + pause
    if now >= until:
        return None
    reason = f"{len(recent)} replacements in the last {CALM / 60:.0f} minutes: the next one after {pause:g} s"
    return Hold(reason=reason, until=until)


def _exhausted(plan: ClusterPlan, count: _Count, log: LaunchLog, now: float) -> NodeAction:
    limit = f"the limit of {plan.replacements_per_hour} replacements an hour is reached"
    if count.staying or count.pending:
        oldest = log.lost_since(now - HOUR)[0]
        return Hold(reason=f"{limit}: going on with fewer nodes", until=oldest.asked_at + HOUR)
    last = count.ended[-1] if count.ended else None
    how = f"; the last one, {last.name}, ended with {last.exit_code} {last.detail}".rstrip() if last else ""
    return GiveUp(exit_code=int(ExitCode.BELOW_MINIMUM), reason=f"{limit} and no node lives{how}")


def _remove(surplus: int, count: _Count, members: Collection[str]) -> tuple[NodeAction, ...]:
    """End the youngest of those that do not train; members are the rendezvous's to release."""
    idle = [instance for instance in reversed(count.staying) if instance.name not in members]
    idle.sort(key=lambda instance: instance.state is InstanceState.RUNNING)
    names = tuple(instance.name for instance in idle[:surplus])
    ending = (Terminate(names=names, reason=f"{_nodes(surplus)} more than planned"),) if names else ()
    bound = surplus - len(names)
    if bound <= 0:
        return ending
    return (*ending, Hold(reason=f"{_nodes(bound)} more than planned, in the current generation"))


def _ask_again(log: LaunchLog, now: float) -> tuple[NodeAction, ...]:
    """Repeat the calls that got no answer, with their own tokens."""
    actions: list[NodeAction] = []
    for record in log.records:
        pause = min(FIRST_PAUSE * 2.0 ** (record.calls - 1), LONGEST_PAUSE)
        if record.awaited is None and now >= record.asked_at + pause:
            reason = f"call {record.calls + 1}: the one before got no answer"
            actions.append(Launch(record=replace(record, asked_at=now), reason=reason))
    return tuple(actions)


def _why(plan: ClusterPlan, grown: int, lost: int) -> str:
    if not lost:
        return f"{_nodes(grown)} more, to have {plan.wanted}"
    return f"{_nodes(grown + lost)} missing of {plan.wanted}"


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
