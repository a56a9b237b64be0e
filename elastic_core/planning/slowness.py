"""What is done about a node that is slower than the others: it is told of, or drained and replaced. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_core.model.progress import SlowWorker
from elastic_core.planning.crew import Crew, Drain, Keep, without


def replace_slow(slow: Sequence[SlowWorker], crew: Crew) -> Drain | Keep | None:
    """Return what to do about slow members where the job wants them replaced; None: there are none.

    One leaves at a time, the slowest first, and none without whom too few would be left.

    Args:
        slow: All that was found, also of nodes that have gone.
        crew: Who trains.
    """
    there = crew.members - crew.leaving
    staying = [found for found in slow if found.is_slow and found.node_id in there]
    if not staying:
        return None
    worst = max(staying, key=lambda found: found.ratio)
    if crew.leaving:
        return Keep(reason=f"{worst.headline()}: replaced once {', '.join(sorted(crew.leaving))} has left")
    return without(crew, worst.node_id, worst.headline())
