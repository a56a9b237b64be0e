"""Which nodes form a generation, and when: start, joins, drains, targets."""

import pytest

from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.rendezvous.events import (
    ProbeNodes,
    PublishGeneration,
    Wait,
    WakeAt,
)
from tests.elastic_core.rendezvous.scenes import causes, lost, of, running, scenario

# ---- start ----------------------------------------------------------------------------------


def test_a_run_waits_for_its_minimum_and_says_how_many_it_has() -> None:
    run = scenario(min_nodes=2)
    assert run.seen("a") == [
        WakeAt(at=60.0),
        Wait(
            reason="1 of 2 nodes, waiting (timeout 60 s)",
            facts=(("generation", "0"), ("ready", "1"), ("seen", "1")),
        ),
    ]


def test_a_reason_is_said_once() -> None:
    run = scenario(min_nodes=2)
    run.seen("a")
    assert run.seen("a", step=3) == []
    assert run.coordinator.reason == "1 of 2 nodes, waiting (timeout 60 s)"


@pytest.mark.case("R09")
def test_it_starts_at_once_when_all_that_the_flow_expects_are_ready() -> None:
    run = scenario()
    run.target(2)
    run.seen("a")
    run.seen("b")
    assert run.members == ("a", "b")
    assert run.generation is not None
    assert (run.generation.number, run.generation.cause, run.generation.restart_count) == (1, Cause.START, 0)


def test_it_starts_at_once_at_the_maximum() -> None:
    run = scenario(max_nodes=2)
    run.seen("a")
    run.seen("b")
    assert run.members == ("a", "b")


@pytest.mark.case("R09")
def test_it_starts_after_the_last_call_when_more_may_come() -> None:
    run = scenario(min_nodes=2, last_call=5.0)
    run.seen("a")
    run.now = 10.0
    assert WakeAt(at=15.0) in run.seen("b")
    run.now = 14.99
    run.tick()
    assert run.generation is None
    run.now = 15.0
    run.tick()
    assert run.members == ("a", "b")


def test_a_last_call_counts_anew_when_the_minimum_was_lost_meanwhile() -> None:
    run = scenario(min_nodes=2, last_call=5.0)
    run.seen("a")
    run.seen("b")
    run.now = 4.0
    run.gone("b")
    run.now = 4.5
    run.seen("c")
    run.now = 5.0
    run.tick()
    assert run.generation is None
    run.now = 9.5
    run.tick()
    assert run.members == ("a", "c")


def test_a_node_that_warms_up_is_not_waited_for() -> None:
    run = scenario()
    run.target(1)
    run.seen("a", phase=NodePhase.WARMING)
    assert run.generation is None
    run.seen("b")
    assert run.members == ("b",)


def test_too_few_nodes_end_the_run_at_the_join_timeout() -> None:
    run = scenario(min_nodes=3, join_timeout=60.0)
    run.seen("a")
    run.seen("b")
    run.now = 60.0
    run.tick()
    assert run.closed == Closed(
        outcome=Outcome.BELOW_MINIMUM,
        exit_code=69,
        reason="2 of 3 nodes were ready within the join timeout of 60 s",
    )


def test_nodes_beyond_the_maximum_stand_by_and_are_promoted() -> None:
    run = running("a", "b", max_nodes=2)
    run.seen("c")
    assert run.members == ("a", "b")
    assert run.coordinator.reason == "generation 1 trains on 2 nodes, 1 standing by"
    run.gone("a")
    run.answered("b")
    assert run.members == ("b", "c")


def test_rank_zero_s_address_and_port_are_the_generations() -> None:
    run = running("a", "b")
    run.seen("b", address="10.9.9.9", master_port=23_456, slots=3)
    run.gone("a")
    run.answered("b")
    assert run.generation is not None
    assert (run.generation.master_address, run.generation.master_port) == ("10.9.9.9", 23_456)
    assert (run.generation.world_size, run.generation.group_world_size) == (3, 1)


# ---- joins, drains, targets -----------------------------------------------------------------


def test_a_ready_node_joins_a_running_generation_at_once() -> None:
    run = running("a")
    run.seen("b", phase=NodePhase.WARMING)
    assert run.members == ("a",)
    run.seen("b", phase=NodePhase.READY)
    assert run.members == ("a", "b")
    assert causes(run) == [Cause.JOIN]
    assert run.generation is not None
    assert run.generation.restart_count == 0


def test_a_join_waits_until_the_members_entered_the_generation_before() -> None:
    run = running("a")
    run.seen("b")
    run.seen("c")
    assert run.members == ("a", "b")
    assert run.coordinator.reason.startswith("generation 2 is forming (0 of 2 nodes entered)")
    run.enter()
    assert run.members == ("a", "b", "c")


def test_a_join_does_not_wait_for_ever_for_a_member_that_does_not_enter() -> None:
    run = running("a", last_call=5.0)
    run.seen("b")
    assert WakeAt(at=5.0) in run.seen("c")
    run.now = 5.0
    run.tick()
    assert run.members == ("a", "b", "c")


def test_a_drain_is_published_at_once_and_without_a_probe() -> None:
    run = running("a", "b")
    commands = run.seen("a", phase=NodePhase.DRAINING)
    assert of(ProbeNodes, commands) == []
    assert run.members == ("b",)
    assert (causes(run), lost(run)) == ([Cause.DRAIN], {"a": "drained"})


@pytest.mark.case("G06")
def test_a_drain_says_what_the_provider_had_announced() -> None:
    run = running("a", "b")
    run.seen("a", phase=NodePhase.DRAINING, notice="spot interruption")
    assert (causes(run), lost(run)) == ([Cause.DRAIN], {"a": "drained: spot interruption"})
    published = run.generation
    assert published is not None
    assert published.reason == "drained a (spot interruption)"


def test_a_drain_below_the_minimum_waits() -> None:
    run = running("a", "b", min_nodes=2)
    run.seen("a", phase=NodePhase.DRAINING)
    assert run.members == ("a", "b")
    assert run.coordinator.reason == "1 of 2 nodes, waiting (timeout 60 s)"
    run.gone("a")
    run.seen("c")
    assert run.members == ("b", "c")
    assert (causes(run), lost(run)) == ([Cause.DRAIN], {"a": "drained"})


def test_a_higher_minimum_holds_for_the_next_generation_and_its_wait_begins_when_it_is_too_few() -> None:
    run = running("a", "b", min_nodes=1)
    run.target(2, least=2)
    assert run.members == ("a", "b")
    run.now += 1_000
    run.seen("b", phase=NodePhase.DRAINING)
    assert run.coordinator.reason == "1 of 2 nodes, waiting (timeout 60 s)"
    run.target(1, least=1)
    assert run.members == ("a",)


def test_a_minimum_that_was_set_is_never_below_the_runs_own() -> None:
    run = running("a", "b", min_nodes=2)
    run.target(2, least=1)
    run.seen("b", phase=NodePhase.DRAINING)
    assert run.coordinator.reason == "1 of 2 nodes, waiting (timeout 60 s)"


def test_the_last_member_that_drains_saves_and_leaves_before_a_joiner_begins() -> None:
    run = running("a", max_nodes=1)
    run.seen("b")
    run.seen("a", phase=NodePhase.DRAINING)
    assert (run.members, run.coordinator.reason) == (("a",), "the last members save and leave: a")
    run.gone("a")
    assert (run.members, causes(run)) == (("b",), [Cause.DRAIN])


def test_a_member_that_drains_for_ever_holds_up_nobody_for_ever() -> None:
    run = running("a", max_nodes=1, stop_timeout=20.0)
    run.seen("b")
    run.seen("a", phase=NodePhase.DRAINING)
    run.now += 20.0
    run.tick()
    assert run.members == ("b",)


def test_a_smaller_target_releases_the_newest_members() -> None:
    run = running("a", "b", "c")
    run.target(1)
    assert run.members == ("a",)
    assert (causes(run), lost(run)) == ([Cause.RESCALE], {"b": "released", "c": "released"})


def test_a_released_node_returns_when_the_target_grows_again() -> None:
    run = running("a", "b")
    run.target(1)
    run.enter()
    run.target(2)
    assert run.members == ("a", "b")
    assert causes(run) == [Cause.RESCALE, Cause.JOIN]


@pytest.mark.parametrize(("wanted", "members"), [(1, 2), (9, 3)])
def test_a_target_is_kept_within_the_bounds_of_the_run(wanted: int, members: int) -> None:
    run = scenario(min_nodes=2, max_nodes=3)
    run.target(wanted)
    for name in "abcd":
        run.seen(name)
    assert len(run.members) == members


def test_newcomers_after_a_join_wait_for_each_other_but_no_longer_than_the_last_call() -> None:
    run = running("a", max_nodes=6, last_call=5.0)
    run.now = 100.0
    assert len(of(PublishGeneration, run.seen("b"))) == 1
    run.now = 101.0
    run.enter()
    run.now = 102.0
    assert WakeAt(at=105.0) in run.seen("c")
    assert of(PublishGeneration, run.seen("d")) == []
    run.now = 105.0
    assert run.tick() != []
    assert run.members == ("a", "b", "c", "d")
