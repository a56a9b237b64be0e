"""How a run ends: success, stop, and closed for good."""

import pytest

from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.rendezvous.events import (
    CloseRun,
    PublishGeneration,
    WakeAt,
)
from tests.elastic_core.rendezvous.scenes import causes, fail, failure, lost, of, running, scenario, succeed


def test_the_run_succeeds_when_all_members_did() -> None:
    run = running("a", "b")
    succeed(run, "a")
    assert run.closed is None
    assert run.coordinator.reason == "1 of 2 nodes finished generation 1"
    succeed(run, "b")
    assert run.closed == Closed(
        outcome=Outcome.SUCCEEDED, exit_code=0, reason="2 nodes finished generation 1"
    )


def test_nothing_is_changed_while_members_finish() -> None:
    run = running("a", "b")
    succeed(run, "a")
    run.seen("c")
    assert (run.members, causes(run)) == (("a", "b"), [])


def test_a_node_that_succeeded_and_left_counts_as_finished() -> None:
    run = running("a", "b")
    succeed(run, "b")
    run.gone("b")
    assert causes(run) == []
    succeed(run, "a")
    assert run.closed is not None
    assert run.closed.outcome is Outcome.SUCCEEDED


def test_a_member_lost_after_rank_zero_finished_does_not_undo_the_success() -> None:
    run = running("a", "b")
    succeed(run, "a")
    run.gone("b")
    assert run.closed is not None
    assert run.closed.outcome is Outcome.SUCCEEDED


def test_a_failure_after_another_node_finished_goes_on_without_the_finished_one() -> None:
    run = running("a", "b")
    succeed(run, "a")
    run.failure(failure("b"))
    assert (run.members, causes(run), lost(run)) == (("b",), [Cause.FAILURE], {"a": "succeeded"})


def test_who_waits_for_a_finished_node_in_vain_is_told_of_it() -> None:
    """Other nodes may come in place of a lost one, but never for one that finished."""
    run = running("a", "b", min_nodes=2, join_timeout=60.0)
    succeed(run, "b")
    run.gone("a")
    assert run.coordinator.reason == "0 of 2 nodes, waiting (timeout 60 s); 1 node has finished already"
    run.now += 60.0
    run.tick()
    assert run.closed is not None
    assert run.closed.outcome is Outcome.BELOW_MINIMUM
    assert run.closed.reason.endswith("within the join timeout of 60 s; 1 node has finished already")


def test_a_job_that_finishes_while_a_node_joins_succeeds_without_it() -> None:
    run = running("a")
    run.seen("b")
    assert run.members == ("a", "b")
    run.seen("a", phase=NodePhase.SUCCEEDED, generation=1)
    assert run.closed is None
    run.now = 5.0
    run.tick()
    assert run.closed is not None
    assert run.closed.reason == "rank 0 finished generation 1 before generation 2 was entered"


@pytest.mark.case("W10")
def test_a_member_that_finished_under_others_that_failed_ends_the_run_if_too_few_are_left() -> None:
    run = running("a", "b", min_nodes=2)
    run.seen("a", step=5)
    succeed(run, "a")
    fail(run, "b", exit_code=7, consequence=True, message="Connection closed by peer")
    run.now += 0.3  # no root cause comes
    run.tick()
    assert run.closed == Closed(
        outcome=Outcome.FAILED,
        exit_code=1,
        reason="rank 0 (node a) finished at step 5, rank 1 (node b) still trained, a restart cannot mend it",
    )


def test_a_standby_takes_the_place_of_a_member_that_finished_early() -> None:
    run = running("a", "b", min_nodes=2, max_nodes=2)
    run.seen("c")
    succeed(run, "a")
    fail(run, "b")
    run.seen("b", phase=NodePhase.READY)
    assert (run.closed, run.members) == (None, ("b", "c"))


def test_who_never_finishes_after_the_others_did_ends_the_run() -> None:
    run = running("a", "b", partial_exit=30.0)
    succeed(run, "b")
    run.now += 29.9
    run.tick()
    assert run.closed is None
    run.now += 0.1
    run.tick()
    assert run.closed is not None
    assert run.closed.reason == (
        "rank 1 (node b) finished, rank 0 (node a) still runs 30 s later, a restart cannot mend it"
    )


@pytest.mark.case("R04")
def test_nodes_that_come_and_go_too_often_end_the_run_and_spend_no_restart() -> None:
    run = running("a", max_restarts=0, changes_per_hour=5)
    for turn in range(3):
        run.seen(f"b{turn}")
        run.enter()
        if turn < 2:
            run.gone(f"b{turn}")
            run.answered("a")
            run.enter()
    assert (run.closed, run.members) == (None, ("a", "b2"))
    assert run.generation is not None
    assert run.generation.restart_count == 0
    run.gone("b2")
    run.answered("a")
    assert run.closed is not None
    assert run.closed.reason.startswith("unsteady: nodes came or went more than 5 times within an hour")


def test_changes_of_an_hour_ago_count_no_more() -> None:
    run = running("a", changes_per_hour=1)
    run.seen("b")
    run.enter()
    run.now += 3600.0
    run.gone("b")
    run.answered("a")
    assert (run.closed, run.members) == (None, ("a",))


def test_closed_stays_closed() -> None:
    run = running("a")
    succeed(run, "a")
    assert run.closed is not None
    run.commands.clear()
    run.seen("b")
    run.gone("a")
    run.target(3)
    run.take_over()
    assert of(PublishGeneration, run.commands) + of(CloseRun, run.commands) == []


def test_a_stop_closes_when_the_members_have_left() -> None:
    run = running("a", "b")
    run.stop("the budget is spent")
    assert run.coordinator.reason == "stopping: 2 nodes still to leave"
    run.gone("b")
    assert (run.closed, causes(run)) == (None, [])
    run.seen("a", phase=NodePhase.DRAINING, generation=0)
    assert run.closed == Closed(
        outcome=Outcome.PREEMPTED, exit_code=75, reason="stopped: the budget is spent"
    )


def test_a_stop_before_the_first_generation_closes_at_once() -> None:
    run = scenario(min_nodes=2)
    run.seen("a")
    run.stop("cancelled")
    assert run.closed is not None
    assert run.closed.outcome is Outcome.PREEMPTED


def test_a_stop_does_not_wait_for_ever() -> None:
    run = running("a", stop_timeout=60.0)
    run.now = 5.0
    assert WakeAt(at=65.0) in run.stop("cancelled")
    run.now = 65.0
    run.tick()
    assert run.closed is not None
    assert run.closed.reason == "stopped: cancelled; 1 node did not leave within 60 s"
