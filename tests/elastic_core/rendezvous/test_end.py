"""How a run ends: success, stop, and closed for good."""

from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.rendezvous.events import (
    CloseRun,
    PublishGeneration,
    WakeAt,
)
from tests.elastic_core.rendezvous.scenes import causes, failure, lost, of, running, scenario, succeed


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
    """A script that ends with 0 on one rank only."""
    run = running("a", "b", min_nodes=2, join_timeout=60.0)
    succeed(run, "b")
    run.failure(failure("a", consequence=True))
    run.now += 10.0  # no root cause comes
    run.tick()
    assert run.coordinator.reason == "1 of 2 nodes, waiting (timeout 60 s); 1 node has finished already"
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
