"""What is done about a node that is slower than the others: it is told of, or drained and replaced. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from elastic_core.ids import NodeId
from elastic_core.model.progress import SlowWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Ask this node to leave; what is missing then is launched as after any other drain."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Nothing is done about it now."""

    reason: str


def replace_slow(
    slow: Sequence[SlowWorker],
    *,
    members: Collection[NodeId],
    standbys: int,
    leaving: Collection[NodeId],
    least: int,
) -> Drain | Keep | None:
    """Return what to do about slow members where the job wants them replaced; None: there are none.

    One leaves at a time, the slowest first, and none without whom too few would be left.

    Args:
        slow: All that was found, also of nodes that have gone.
        members: Nodes of the current generation that are there.
        standbys: Ready nodes beyond them.
        leaving: Those of the members that leave already.
        least: Below so many nodes training cannot go on.
    """
    staying = [found for found in slow if found.is_slow and found.node_id in members]
    staying = [found for found in staying if found.node_id not in leaving]
    if not staying:
        return None
    worst = max(staying, key=lambda found: found.ratio)
    if leaving:
        return Keep(reason=f"{worst.headline()}: replaced once {', '.join(sorted(leaving))} has left")
    left = len(members) - 1 + standbys
    if left < least:
        return Keep(reason=f"{worst.headline()}: kept, for {left} would be left of at least {least}")
    return Drain(node_id=worst.node_id, reason=worst.headline())
