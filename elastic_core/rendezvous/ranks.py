"""Who gets which rank: survivors first in their old order, then newcomers as they arrived.

A survivor keeps its place as long as nobody before it is lost, so that rank 0, and
with it the source of the training state, moves only when its node is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from elastic_core.ids import NodeId, Revision
from elastic_core.model.membership import Assignment, Member
from elastic_core.model.node import NodeRecord


def choose_members(
    previous: Iterable[NodeId],
    ready: Collection[NodeId],
    joined: Mapping[NodeId, Revision],
    *,
    limit: int,
) -> tuple[NodeId, ...]:
    """Return the nodes of the next generation in the order of their group ranks.

    Args:
        previous: Members of the current generation, in their order.
        ready: Nodes that can enter a generation at once.
        joined: Store revision at which each node arrived; no clock takes part.
        limit: Members at most; the newest arrivals stand by.
    """
    survivors = [node for node in previous if node in ready]
    known = set(survivors)
    newcomers = sorted((joined[node], node) for node in ready if node not in known)
    return tuple(survivors + [node for _, node in newcomers])[:limit]


def assign_ranks(chosen: Sequence[NodeId], records: Mapping[NodeId, NodeRecord]) -> tuple[Member, ...]:
    """Give each chosen node its group rank and its span of ranks; slots may differ by node."""
    members = []
    first_rank = 0
    for group_rank, node_id in enumerate(chosen):
        record = records[node_id]
        members.append(
            Member(
                node_id=node_id,
                address=record.address,
                slots=record.slots,
                group_rank=group_rank,
                first_rank=first_rank,
            )
        )
        first_rank += record.slots
    return tuple(members)


def assignments_of(number: int, members: Iterable[Member]) -> tuple[Assignment, ...]:
    """Return what each member is told of generation `number`."""
    return tuple(
        Assignment(
            number=number,
            node_id=member.node_id,
            group_rank=member.group_rank,
            first_rank=member.first_rank,
            slots=member.slots,
        )
        for member in members
    )
