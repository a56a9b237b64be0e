"""Writes that succeed, are refused or stay unanswered, and the successor of a coordinator."""

from dataclasses import replace

import pytest

from elastic_core.errors import IllegalEvent
from elastic_core.ids import NodeId, Revision
from elastic_core.model.membership import Assignment
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    FenceNode,
    NodeSeen,
    ProbeNodes,
    PublishGeneration,
    StoreView,
    WakeAt,
)
from elastic_core.testing.scenario import DEFAULT_POLICY, Scenario
from tests.elastic_core.rendezvous.scenes import causes, lost, of, running, scenario


def test_nothing_is_decided_while_a_commit_is_in_flight() -> None:
    run = scenario(manual=True, max_nodes=2)
    run.seen("a")
    run.seen("b")
    run.commands.clear()
    run.gone("b")
    run.seen("c")
    assert of(PublishGeneration, run.commands) == []
    run.commit()
    assert of(ProbeNodes, run.commands) == [ProbeNodes(nodes=(NodeId("a"),))]


def test_a_refused_commit_is_decided_anew_from_the_stores_view() -> None:
    run = scenario(manual=True, max_nodes=2)
    run.seen("a")
    run.seen("b")
    commands = of(PublishGeneration, run.refuse())
    assert [c.generation.number for c in commands if isinstance(c, PublishGeneration)] == [1]


def test_a_commit_that_happened_unanswered_is_adopted() -> None:
    run = scenario(manual=True, max_nodes=2)
    run.seen("a")
    run.seen("b")
    commands = run.apply_unanswered()
    assert of(PublishGeneration, commands) == []
    assert run.coordinator.reason == "generation 1 trains on 2 nodes"


def test_a_store_that_refuses_again_and_again_is_asked_more_slowly() -> None:
    run = scenario(manual=True, max_nodes=1)
    run.seen("a")
    run.refuse()
    assert WakeAt(at=0.1) in run.refuse()
    run.now = 0.1
    assert len(of(PublishGeneration, run.tick())) == 1
    assert WakeAt(at=pytest.approx(0.3)) in run.refuse()


def test_a_refused_close_is_tried_again() -> None:
    run = Scenario(DEFAULT_POLICY, manual=True)
    run.stop("cancelled")
    assert len(of(CloseRun, run.tell(CommitFailed(view=run.view)))) == 1


def test_a_conflicting_generation_of_another_coordinator_is_taken_over() -> None:
    run = running("a", "b")
    foreign = replace(run.view)
    assert foreign.current is not None
    assert foreign.history is not None
    newer = replace(foreign.current, number=2)
    entry = replace(foreign.history, generation=newer, members=foreign.history.members[:1])
    run.tell(CommitFailed(view=replace(foreign, current=newer, history=entry, current_revision=Revision(50))))
    commands = run.seen("a", generation=2)
    (published,) = of(PublishGeneration, commands)
    assert isinstance(published, PublishGeneration)
    assert (published.generation.number, published.based_on) == (3, 50)


def test_a_success_that_was_not_asked_for_is_an_error_with_the_story() -> None:
    run = running("a")
    with pytest.raises(IllegalEvent, match="NodeSeen"):
        run.tell(CommitSucceeded(number=9, revision=Revision(99)))
    assert run.coordinator.reason == "generation 1 trains on 1 node"


def test_a_successor_publishes_nothing_for_its_own_sake() -> None:
    run = running("a", "b")
    assert of(PublishGeneration, run.take_over()) == []
    assert run.coordinator.reason == "generation 1 trains on 2 nodes"


def test_a_successor_sees_that_its_predecessors_node_is_lost() -> None:
    run = running("a", "b")
    view = replace(run.view, nodes=tuple(n for n in run.view.nodes if n.node_id != "a"))
    successor = Scenario(DEFAULT_POLICY, view)
    assert of(ProbeNodes, successor.tick()) == [ProbeNodes(nodes=(NodeId("b"),))]
    successor.answered("b")
    assert (successor.members, lost(successor)) == (("b",), {"a": "lease ended"})


def test_assignments_tell_each_member_its_ranks() -> None:
    run = scenario(max_nodes=2)
    run.seen("a", slots=2)
    run.seen("b")
    (published,) = of(PublishGeneration, run.commands)
    assert isinstance(published, PublishGeneration)
    assert published.based_on == 0
    assert published.assignments == (
        Assignment(number=1, node_id=NodeId("a"), group_rank=0, first_rank=0, slots=2),
        Assignment(number=1, node_id=NodeId("b"), group_rank=1, first_rank=2, slots=1),
    )


def test_a_change_is_dated_from_its_first_sign() -> None:
    run = running("a", "b")
    run.now = 7.0
    run.seen("a", broken=1)
    run.now = 7.4
    run.gone("b")
    entry = run.view.history
    assert entry is not None
    assert (entry.detected_at, entry.published_at) == (7.0, 7.4)


def test_an_early_timer_is_set_again() -> None:
    run = scenario(min_nodes=1, last_call=5.0)
    run.seen("a")
    run.now = 4.999
    assert run.tick() == [WakeAt(at=5.0)]


def test_the_first_event_after_construction_asks_for_the_first_wake_up() -> None:
    run = Scenario(DEFAULT_POLICY, StoreView())
    assert run.tick()[0] == WakeAt(at=60.0)


def test_a_node_that_is_seen_again_ends_the_inquiry_about_its_loss() -> None:
    run = running("a", "b")
    record = run.view.nodes[1]
    run.gone("b")
    run.tell(NodeSeen(record=record, joined=Revision(77)))
    run.now = 0.3
    assert of(FenceNode, run.tick()) == []
    assert (causes(run), run.coordinator.reason) == ([], "generation 1 trains on 2 nodes")
