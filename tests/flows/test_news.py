"""Each fact is told once, in its order, with what an automation needs."""

from dataclasses import replace

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.ids import NodeId
from elastic_core.model.membership import Cause, Closed, Member, Outcome, Target
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import HistoryEntry
from flows.news import news_between, news_of_costs
from tasks.watch import Observation
from tests.elastic_core.planning.test_slowness import SLOW
from tests.flows.test_live import ENTRY, GENERATION, progress, record

NOTHING = Observation()


def entry(number: int, cause: Cause, *nodes: str, **changes: object) -> HistoryEntry:
    members = tuple(
        Member(node_id=NodeId(node), address="x", slots=1, group_rank=rank, first_rank=rank)
        for rank, node in enumerate(nodes)
    )
    generation = replace(GENERATION, number=number, cause=cause, group_world_size=len(nodes))
    return replace(ENTRY, generation=generation, members=members, **changes)  # type: ignore[arg-type]


FIRST = entry(1, Cause.START, "a.1", "b.1")
SECOND = entry(2, Cause.LOSS, "a.1", lost={NodeId("b.1"): "silent for 0.3 s"})
THIRD = entry(3, Cause.JOIN, "a.1", "c.1")


def told(before: Observation, after: Observation) -> list[tuple[str, object]]:
    return [(each.name, each.payload.get("node")) for each in news_between(before, after)]


def test_a_loss_and_a_join_are_told_with_their_nodes_in_their_order() -> None:
    before, after = Observation(history=(FIRST,)), Observation(history=(FIRST, SECOND, THIRD))
    assert told(before, after) == [
        ("elastic.generation.formed", None),
        ("elastic.node.lost", "b"),
        ("elastic.generation.formed", None),
        ("elastic.node.joined", "c"),
    ]
    assert told(after, after) == []


def test_who_left_on_purpose_is_not_lost() -> None:
    drained = entry(2, Cause.DRAIN, "a.1", lost={NodeId("b.1"): "drained"})
    found = told(Observation(history=(FIRST,)), Observation(history=(FIRST, drained)))
    assert found[-1] == ("elastic.node.drained", "b")


def test_another_size_and_the_end_are_told_once() -> None:
    closed = Closed(outcome=Outcome.FAILED, exit_code=1, reason="ValueError: bad label 7")
    before = Observation(target=Target(nodes=2))
    after = Observation(target=Target(nodes=3), closed=closed)
    rescaled, ended = news_between(before, after)
    assert (rescaled.name, rescaled.payload) == ("elastic.run.rescaled", {"from": 2, "to": 3})
    assert ended.payload == {"outcome": "failed", "reason": "ValueError: bad label 7"}
    assert told(after, after) == []


def test_a_slow_node_is_told_once_with_its_evidence_and_its_recovery_is_no_event() -> None:
    after = Observation(slow=(SLOW,))
    (news,) = news_between(NOTHING, after)
    assert news.name == "elastic.node.slow"
    assert news.payload == {"node": "b", "ratio": 2.0, "headline": SLOW.headline()}
    assert told(after, after) == []
    assert told(after, Observation(slow=(replace(SLOW, is_slow=False),))) == []


def test_the_first_target_is_no_rescale() -> None:
    assert told(NOTHING, Observation(target=Target(nodes=2))) == []


def test_a_notice_is_told_once_whether_the_node_or_its_provider_has_it() -> None:
    node = replace(record("node-1.a", NodePhase.DRAINING), notice="spot interruption")
    taken = Instance(name="node-2", state=InstanceState.STOPPING, detail="spot interruption")
    both = Observation(nodes=(node,), instances=(taken, replace(taken, name="node-1")))
    found = [(each.name, each.payload) for each in news_between(NOTHING, both)]
    assert found == [
        ("elastic.node.notice", {"node": "node-2", "notice": "spot interruption"}),
        ("elastic.node.notice", {"node": "node-1", "notice": "spot interruption"}),
    ]
    assert told(both, replace(both, nodes=())) == []


def test_a_checkpoint_is_told_when_it_is_durable_and_when_it_cannot_be_written() -> None:
    first, second = progress(60), progress(80)
    after = Observation(progress=replace(second, durable_step=70, trouble="OSError: disk full"))
    before = Observation(progress=first)
    written, failed = news_between(before, after)
    assert (written.name, written.payload) == ("elastic.checkpoint.written", {"step": 70})
    assert (failed.name, failed.payload) == (
        "elastic.checkpoint.failed",
        {"step": 80, "why": "OSError: disk full"},
    )
    assert told(after, after) == told(after, before) == []


def test_each_share_of_the_budget_is_told_when_it_is_crossed() -> None:
    assert [each.payload["percent"] for each in news_of_costs(0, 8.5, 10)] == [50, 80]
    (last,) = news_of_costs(8.5, 10.004, 10)
    assert (last.name, last.payload) == (
        "elastic.budget.reached",
        {"percent": 100, "spent_usd": 10.0, "budget_usd": 10},
    )
    assert list(news_of_costs(10.004, 12, 10)) == list(news_of_costs(0, 12, 0)) == []
