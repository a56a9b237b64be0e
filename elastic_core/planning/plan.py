"""What a job needs of its provider, as numbers that reconciliation holds to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from elastic_core.model.job import JobSpec

LEAST_REPLACEMENTS: Final = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """How many nodes a run shall have.

    Attributes:
        nodes: Nodes to keep alive.
        min_nodes: Below so many training cannot go on.
        max_nodes: Nodes at most, the spares not counted.
        spares: Nodes beyond `nodes` that stand by, set up.
        replacements_per_hour: Nodes launched for lost ones within an hour at most. Spot capacity
            that comes and goes stays below it; a node that dies at once wherever it starts does not.
        release: Instances to end even if they are members of the current generation.
    """

    nodes: int
    min_nodes: int
    max_nodes: int
    spares: int = 0
    replacements_per_hour: int = LEAST_REPLACEMENTS
    release: frozenset[str] = frozenset()

    @property
    def wanted(self) -> int:
        """Nodes to have, standing by or in training."""
        return min(self.nodes, self.max_nodes) + self.spares

    @property
    def most(self) -> int:
        """Nodes never to exceed, those counted that were asked for and not seen yet."""
        return self.max_nodes + self.spares

    def resized(self, nodes: int) -> ClusterPlan:
        """Return the plan for another number of nodes, kept within its bounds."""
        return replace(self, nodes=min(max(nodes, self.min_nodes), self.max_nodes))

    def releasing(self, names: frozenset[str]) -> ClusterPlan:
        """Return the plan that ends these instances, whatever they do."""
        return replace(self, release=names)


def plan_cluster(job: JobSpec) -> ClusterPlan:
    """Return what a job asks for when it starts."""
    return ClusterPlan(
        nodes=job.nodes.target,
        min_nodes=job.nodes.min,
        max_nodes=job.nodes.max,
        spares=job.nodes.standby,
        replacements_per_hour=max(LEAST_REPLACEMENTS, 3 * (job.nodes.target + job.nodes.standby)),
    )
