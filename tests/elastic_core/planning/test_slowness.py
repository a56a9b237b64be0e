"""A slow member is replaced where the job wants it, one at a time, and never below the minimum."""

from collections.abc import Collection
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_core.ids import NodeId
from elastic_core.model.progress import SlowWorker
from elastic_core.planning.crew import Crew, Drain, Keep
from elastic_core.planning.slowness import replace_slow

A, B, C = NodeId("a.1"), NodeId("b.1"), NodeId("c.1")
SLOW = SlowWorker(
    node_id=B, rank=1, local_rank=0, generation=2, step=90, is_slow=True, ratio=2.0, seconds=0.4,
    others=0.2, looks=40,
)  # fmt: skip


def decide(
    *slow: SlowWorker,
    members: Collection[NodeId] = (A, B, C),
    standbys: int = 0,
    leaving: Collection[NodeId] = (),
    least: int = 1,
) -> Drain | Keep | None:
    crew = Crew(members=set(members), standbys=standbys, leaving=set(leaving), least=least)
    return replace_slow(slow, crew)


def test_a_slow_member_is_drained_with_its_evidence() -> None:
    assert decide(SLOW) == Drain(
        node_id=B,
        reason="rank 1 on node b.1 is slow: 2.0 times as long as the others "
        "(0.4 s of its own work a step, the others 0.2 s, over 40 steps up to step 90)",
    )


def test_the_slowest_goes_first_and_the_next_once_it_has_left() -> None:
    worse = replace(SLOW, node_id=C, ratio=3.0)
    first = decide(SLOW, worse)
    assert isinstance(first, Drain)
    assert first.node_id == C
    held = decide(SLOW, worse, leaving=(C,))
    assert isinstance(held, Keep)
    assert held.reason.endswith("replaced once c.1 has left")


def test_without_enough_others_it_is_kept_unless_a_standby_is_there() -> None:
    kept = decide(SLOW, members=(A, B), least=2)
    assert isinstance(kept, Keep)
    assert kept.reason.endswith("kept, for 1 would be left of at least 2")
    assert isinstance(decide(SLOW, members=(A, B), standbys=1, least=2), Drain)


def test_who_recovered_or_has_gone_is_left_alone() -> None:
    assert decide(replace(SLOW, is_slow=False)) is None
    assert decide(SLOW, members=(A, C)) is None
    assert decide(SLOW, leaving=(B,)) is None
    assert decide() is None


NODES = [NodeId(f"n{number}.1") for number in range(6)]


@given(
    st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)), st.sets(st.sampled_from(NODES)),
    st.integers(0, 3), st.integers(1, 6),
)  # fmt: skip
def test_one_at_a_time_leaves_and_never_too_few_stay(
    ill: set[NodeId], members: set[NodeId], leaving: set[NodeId], standbys: int, least: int
) -> None:
    slow = [replace(SLOW, node_id=node, ratio=1.5 + number) for number, node in enumerate(sorted(ill))]
    action = decide(*slow, members=members, standbys=standbys, leaving=leaving & members, least=least)
    if isinstance(action, Drain):
        assert action.node_id in ill & members
        assert not leaving & members
        assert len(members) - 1 + standbys >= least
    elif action is None:
        assert not ill & members - leaving
