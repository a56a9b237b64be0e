"""What happened to a run between two looks at it, as events that Prefect's automations can act on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from elastic_core.cluster.provider import InstanceState
from elastic_core.ids import instance_of
from elastic_core.model.membership import Cause
from elastic_core.model.progress import HistoryEntry
from tasks.watch import Observation

PREFIX: Final = "elastic"
BUDGET_PERCENTS: Final = (50, 80, 100)
"""Shares of `pool.budget_usd` at which somebody is told."""


@dataclass(frozen=True, slots=True)
class News:
    """One event.

    Attributes:
        name: `elastic.node.lost` and the like.
        payload: Plain values.
    """

    name: str
    payload: dict[str, Any]


def news_between(before: Observation, after: Observation) -> Iterator[News]:
    """Yield what is new in the later look, in the order in which it happened."""
    known = {entry.generation.number for entry in before.history}
    fresh = [entry for entry in after.history if entry.generation.number not in known]
    members = {member.node_id for entry in before.history[-1:] for member in entry.members}
    for entry in fresh:
        yield from _of_generation(entry, members)
        members = {member.node_id for member in entry.members}
    if before.target and after.target and before.target.nodes != after.target.nodes:
        yield News(f"{PREFIX}.run.rescaled", {"from": before.target.nodes, "to": after.target.nodes})
    for failure in after.failures[len(before.failures) :]:
        if not failure.consequence:
            payload = {"node": instance_of(failure.node_id), "headline": failure.headline()}
            yield News(f"{PREFIX}.worker.failed", payload)
    yield from _of_notices(before, after)
    yield from _of_checkpoints(before, after)
    told = {(slow.node_id, slow.local_rank) for slow in before.slow if slow.is_slow}
    for slow in after.slow:
        if slow.is_slow and (slow.node_id, slow.local_rank) not in told:
            facts = {"node": instance_of(slow.node_id), "ratio": slow.ratio, "headline": slow.headline()}
            yield News(f"{PREFIX}.node.slow", facts)
    if after.closed is not None and before.closed is None:
        payload = {"outcome": str(after.closed.outcome), "reason": after.closed.reason}
        yield News(f"{PREFIX}.run.ended", payload)


def news_of_costs(before_usd: float, after_usd: float, budget_usd: float) -> Iterator[News]:
    """Yield which shares of the budget were spent between two looks; nothing without a budget."""
    for percent in BUDGET_PERCENTS:
        if before_usd < budget_usd * percent / 100 <= after_usd:
            facts = {"percent": percent, "spent_usd": round(after_usd, 2), "budget_usd": budget_usd}
            yield News(f"{PREFIX}.budget.reached", facts)


def _of_notices(before: Observation, after: Observation) -> Iterator[News]:
    known = _notices(before)
    for node, notice in _notices(after).items():
        if node not in known:
            yield News(f"{PREFIX}.node.notice", {"node": node, "notice": notice})


def _notices(seen: Observation) -> Mapping[str, str]:
    """Return the nodes that will be taken away: by their own word, or by their provider's."""
    leaving = (each for each in seen.instances if each.state is InstanceState.STOPPING)
    told = {instance.name: instance.detail for instance in leaving if instance.detail}
    return told | {instance_of(node.node_id): node.notice for node in seen.nodes if node.notice}


def _of_checkpoints(before: Observation, after: Observation) -> Iterator[News]:
    now, then = after.progress, before.progress
    if now is None:
        return
    if now.durable_step >= 0 and (then is None or now.durable_step != then.durable_step):
        yield News(f"{PREFIX}.checkpoint.written", {"step": now.durable_step})
    if now.trouble and (then is None or now.trouble != then.trouble):
        yield News(f"{PREFIX}.checkpoint.failed", {"step": now.step, "why": now.trouble})


def _of_generation(entry: HistoryEntry, before: set[Any]) -> Iterator[News]:
    generation = entry.generation
    payload = {
        "number": generation.number,
        "cause": str(generation.cause),
        "nodes": generation.group_world_size,
    }
    yield News(f"{PREFIX}.generation.formed", payload)
    for node, how in entry.lost.items():
        left = "drained" if generation.cause is Cause.DRAIN else "lost"
        yield News(f"{PREFIX}.node.{left}", {"node": instance_of(node), "how": how})
    for member in entry.members:
        if member.node_id not in before:
            yield News(f"{PREFIX}.node.joined", {"node": instance_of(member.node_id)})
