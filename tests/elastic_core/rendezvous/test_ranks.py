"""Ranks: survivors first and in order, newcomers as they arrived, no gaps."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_core.ids import NodeId, Revision
from elastic_core.rendezvous.ranks import assign_ranks, assignments_of, choose_members
from elastic_core.testing.scenario import make_record

A, B, C, D = (NodeId(name) for name in "abcd")
ARRIVAL = {A: Revision(1), B: Revision(2), C: Revision(3), D: Revision(4)}


def test_survivors_keep_their_order_when_rank_zero_is_lost() -> None:
    assert choose_members([C, A, B], {A, B, D}, ARRIVAL, limit=4) == (A, B, D)


def test_newcomers_come_after_survivors_even_if_they_arrived_earlier() -> None:
    assert choose_members([D], {A, D}, ARRIVAL, limit=4) == (D, A)


def test_newcomers_are_ordered_by_the_stores_revision_not_by_name() -> None:
    arrival = {A: Revision(9), B: Revision(3), C: Revision(5)}
    assert choose_members([], {A, B, C}, arrival, limit=4) == (B, C, A)


def test_the_newest_stand_by_when_there_is_no_room() -> None:
    assert choose_members([B], {A, B, C}, ARRIVAL, limit=2) == (B, A)


def test_ranks_tile_the_world_when_slots_differ() -> None:
    records = {node: make_record(node) for node in (A, B)}
    records[C] = make_record(C)
    sizes = {A: 2, B: 1, C: 4}
    sized = {node: replace(record, slots=sizes[node]) for node, record in records.items()}
    members = assign_ranks([B, C, A], sized)
    assert [(m.node_id, m.group_rank, m.first_rank, m.slots) for m in members] == [
        (B, 0, 0, 1),
        (C, 1, 1, 4),
        (A, 2, 5, 2),
    ]


def test_assignments_carry_the_number_and_the_members_ranks() -> None:
    members = assign_ranks([B, A], {node: make_record(node) for node in (A, B)})
    told = assignments_of(7, members)
    assert [(a.number, a.node_id, a.group_rank, a.first_rank, a.slots) for a in told] == [
        (7, B, 0, 0, 1),
        (7, A, 1, 1, 1),
    ]


NODES = st.lists(st.sampled_from([NodeId(f"n{i}") for i in range(12)]), unique=True)


def choose_slowly(previous: list[NodeId], ready: list[NodeId], limit: int) -> tuple[NodeId, ...]:
    """What `choose_members` should do, as plainly as it can be said."""
    chosen = [node for node in previous if node in ready]
    for revision in range(100):
        for node in ready:
            if node not in chosen and arrival_of(node) == revision:
                chosen.append(node)
    while len(chosen) > limit:
        chosen.pop()
    return tuple(chosen)


def arrival_of(node: NodeId) -> Revision:
    return Revision(int(node[1:]) * 7 % 13)


@given(previous=NODES, ready=NODES, limit=st.integers(1, 12))
def test_choice_equals_the_plain_one(previous: list[NodeId], ready: list[NodeId], limit: int) -> None:
    joined = {node: arrival_of(node) for node in ready}
    assert choose_members(previous, set(ready), joined, limit=limit) == choose_slowly(previous, ready, limit)
