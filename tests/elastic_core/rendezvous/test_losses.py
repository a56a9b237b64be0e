"""Members that vanish, and how they are told from members that only failed."""

import pytest

from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.membership import Cause, Outcome
from elastic_core.rendezvous.events import (
    FenceNode,
    ProbeNodes,
)
from tests.elastic_core.rendezvous.scenes import causes, lost, of, running, stay_silent


@pytest.mark.case("R09")
def test_a_lost_member_is_a_loss_and_spends_no_restart() -> None:
    run = running("a", "b")
    assert of(ProbeNodes, run.gone("b")) == [ProbeNodes(nodes=(NodeId("a"),))]
    run.answered("a")
    assert run.members == ("a",)
    assert (causes(run), lost(run)) == ([Cause.LOSS], {"b": "lease ended"})
    assert run.generation is not None
    assert run.generation.restart_count == 0
    assert run.generation.reason == "lost b (lease ended)"


def test_broken_collectives_prove_life_so_that_nobody_need_be_asked() -> None:
    run = running("a", "b")
    run.seen("a", broken=1)
    run.gone("b")
    assert run.members == ("a",)
    assert causes(run) == [Cause.LOSS]


def test_a_silent_member_is_asked_three_times_then_fenced_then_lost() -> None:
    run = running("a", "b", probe_timeout=0.3)
    assert of(ProbeNodes, run.seen("a", broken=1)) == [ProbeNodes(nodes=(NodeId("b"),))]
    for moment in (0.1, 0.2):
        run.now = moment
        assert of(ProbeNodes, run.tick()) == [ProbeNodes(nodes=(NodeId("b"),))]
    run.now = 0.301
    lease = LeaseId(100 + 2)
    assert of(FenceNode, run.tick()) == [
        FenceNode(node_id=NodeId("b"), lease=lease, reason="silent for 0.3 s")
    ]
    run.gone("b")
    assert (run.members, lost(run)) == (("a",), {"b": "silent for 0.3 s"})
    assert run.generation is not None
    assert (run.generation.cause, run.generation.restart_count) == (Cause.LOSS, 0)


def test_a_coordinator_that_was_late_itself_asks_again_instead_of_fencing() -> None:
    run = running("a", "b")
    run.seen("a", broken=1)
    for moment in (0.1, 0.2):
        run.now = moment
        run.tick()
    run.now = 5.0
    assert of(FenceNode, run.tick()) == []
    run.answered("b")
    run.now = 5.2
    run.tick()
    assert (run.members, causes(run)) == (("a", "b"), [Cause.FAILURE])


def test_fencing_is_asked_again_every_second_until_the_node_is_gone() -> None:
    run = running("a", "b")
    run.seen("a", broken=1)
    assert len(of(FenceNode, stay_silent(run))) == 1
    run.now = 1.0
    assert of(FenceNode, run.tick()) == []
    run.now = 1.31
    assert len(of(FenceNode, run.tick())) == 1


def test_an_answer_after_the_fence_comes_too_late() -> None:
    run = running("a", "b")
    run.seen("a", broken=1)
    stay_silent(run)
    run.answered("b")
    run.seen("b", broken=1)
    assert run.members == ("a", "b")
    run.gone("b")
    assert run.members == ("a",)


def test_many_losses_at_once_make_one_generation() -> None:
    names = [f"n{i:02}" for i in range(20)]
    run = running(*names, max_nodes=20)
    run.gone("n05")
    run.answered("n00")
    run.answered("n01")
    fences = of(FenceNode, stay_silent(run))
    assert len(fences) == 17
    for fence in fences:
        assert isinstance(fence, FenceNode)
        run.gone(fence.node_id)
    assert (run.members, causes(run)) == (("n00", "n01"), [Cause.LOSS])


def test_when_all_members_are_lost_the_next_ones_are_waited_for_as_at_the_start() -> None:
    run = running("a", "b", max_nodes=2, last_call=5.0)
    run.gone("a")
    run.gone("b")
    run.seen("c")
    assert run.members == ("a", "b")
    run.seen("d")
    assert (run.members, causes(run)) == (("c", "d"), [Cause.LOSS])


def test_after_a_loss_below_the_minimum_the_join_timeout_runs() -> None:
    run = running("a", "b", min_nodes=2, join_timeout=60.0)
    run.now = 100.0
    run.gone("b")
    run.answered("a")
    run.now = 159.0
    run.tick()
    assert run.closed is None
    run.now = 160.0
    run.tick()
    assert run.closed is not None
    assert run.closed.outcome is Outcome.BELOW_MINIMUM
