"""What happened to a run between two looks at it, as events that Prefect's automations can act on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from elastic_core.ids import instance_of
from elastic_core.model.membership import Cause
from elastic_core.model.progress import HistoryEntry
from tasks.watch import Observation

PREFIX: Final = "elastic"


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
    told = {(slow.node_id, slow.local_rank) for slow in before.slow if slow.is_slow}
    for slow in after.slow:
        if slow.is_slow and (slow.node_id, slow.local_rank) not in told:
            facts = {"node": instance_of(slow.node_id), "ratio": slow.ratio, "headline": slow.headline()}
            yield News(f"{PREFIX}.node.slow", facts)
    if after.closed is not None and before.closed is None:
        payload = {"outcome": str(after.closed.outcome), "reason": after.closed.reason}
        yield News(f"{PREFIX}.run.ended", payload)


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
