"""Which node is left out because its workers fail again and again, where those of others do not. Pure.

One failure may be chance, and a program's own mistake fails on any node. A node that was the root
cause of several failures in a row, beside others that were of none, is ill. It is drained, and what
is launched in its place is another machine, or at least another start; it does not come back.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_core.ids import instance_of
from elastic_core.model.failure import Failure
from elastic_core.planning.crew import Crew, Drain, Keep, without


def exclude_failing(failures: Sequence[Failure], crew: Crew, *, after: int) -> Drain | Keep | None:
    """Return what to do about a member that keeps failing; None: there is none.

    Args:
        failures: All of the run, in the order in which the store got them.
        crew: Who trains.
        after: Failures in a row that are too many; 0: no number is.
    """
    roots = {one.generation: one for one in reversed(failures) if not one.consequence}
    streak = [roots[generation] for generation in sorted(roots)][-after:] if after else []
    instances = {instance_of(failure.node_id) for failure in streak}
    if len(streak) < after or len(instances) != 1 or len(crew.members) == 1:
        return None
    there = crew.members - crew.leaving
    ill = next((node_id for node_id in there if instance_of(node_id) in instances), None)
    if ill is None:
        return None
    last = streak[-1].message
    return without(crew, ill, f"the last {after} failures all began on {instance_of(ill)} ({last})")
