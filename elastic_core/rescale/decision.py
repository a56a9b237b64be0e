"""From a wish to a target: within the job's limits, or refused, each mistake in one line.

A job's own bounds are what its nodes were started with, so a running job can be
held to narrower ones, never to wider ones.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from elastic_core.errors import RefusedInput
from elastic_core.model.job import NodeBounds
from elastic_core.model.membership import Target


class Rescale(BaseModel):
    """A wish for another size; what is 0 stays as it is."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Rescale")

    target: int = Field(0, ge=0, le=10_000, description="Nodes to have; 0: as now, within the bounds.")
    min: int = Field(0, ge=0, le=10_000, description="From now on training waits below so many; 0: as now.")
    max: int = Field(0, ge=0, le=10_000, description="From now on no more than so many; 0: as now.")


def decide(wish: Rescale, job: NodeBounds, now: Target | None) -> Target:
    """Return the target that a wish leads to.

    Args:
        wish: What was asked for.
        job: The job's own bounds.
        now: The target in force, None before the first.

    Raises:
        RefusedInput: It is outside the job's limits, or asks for nothing.
    """
    held = now or Target(nodes=job.target)
    least, most = wish.min or held.least or job.min, wish.max or held.most or job.max
    problems = [
        f"{name} is {value}: choose one from {job.min} to {job.max}, the job's own bounds"
        for name, value in (("min", wish.min), ("max", wish.max), ("target", wish.target))
        if value and not job.min <= value <= job.max
    ]
    if not (wish.target or wish.min or wish.max):
        problems.append("nothing was asked for: give a target, a min or a max")
    if not problems and least > most:
        problems.append(f"min is {least} and max is {most}: raise max or lower min")
    nodes = wish.target or min(max(held.nodes, least), most)
    if not problems and not least <= nodes <= most:
        problems.append(f"target is {nodes}: choose one from min ({least}) to max ({most})")
    if not problems and job.allowed.largest_within(nodes) != nodes:
        problems.append(f"target is {nodes}: choose an allowed size ({job.allowed.describe()})")
    if problems:
        raise RefusedInput(problems)
    return Target(nodes=nodes, least=least, most=most)


def describe(before: Target | None, after: Target) -> str:
    """Say in one sentence what a rescale changes."""
    was = f"from {before.nodes} " if before else ""
    return f"the target goes {was}to {after.nodes} nodes (from {after.least} to {after.most})"
