"""Who trains, and which of them can be done without: what decisions about single members share. Pure."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from elastic_core.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """The nodes of a run at one moment.

    Attributes:
        members: Those of the current generation that are there.
        standbys: Ready nodes beyond them.
        leaving: Those of the members that leave already.
        least: Below so many nodes training cannot go on.
    """

    members: Set[NodeId]
    standbys: int = 0
    leaving: Set[NodeId] = frozenset()
    least: int = 1

    @property
    def left_without_one(self) -> int:
        """How many would be there if one more left."""
        return len(self.members - self.leaving) - 1 + self.standbys


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Ask this node to leave; what is missing then is launched as after any other drain."""

    node_id: NodeId
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Nothing is done about it now."""

    reason: str


def without(crew: Crew, node_id: NodeId, reason: str) -> Drain | Keep:
    """Return the node's drain, or why it is kept: too few would be left."""
    left = crew.left_without_one
    if left < crew.least:
        return Keep(reason=f"{reason}: kept, for {left} would be left of at least {crew.least}")
    return Drain(node_id=node_id, reason=reason)
