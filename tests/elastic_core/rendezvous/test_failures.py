"""Workers that fail on living nodes: restarts, their budget, and the run's end by them."""

import pytest

from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.node import NodePhase
from tests.elastic_core.rendezvous.scenes import causes, fail, failure, lost, running, scenario


def test_a_failed_worker_spends_a_restart_and_the_others_go_on() -> None:
    run = running("a", "b")
    fail(run, "b", exit_code=137)
    run.answered("a")
    assert run.members == ("a",)
    assert (causes(run), lost(run)) == ([Cause.FAILURE], {"b": "worker failed"})
    assert run.generation is not None
    assert run.generation.restart_count == 1
    run.enter()
    run.seen("b", phase=NodePhase.READY)
    assert run.members == ("a", "b")
    assert run.generation.restart_count == 1


def test_a_torchrun_node_stays_in_the_generation_after_its_failure() -> None:
    run = running("a", "b")
    run.failure(failure("b"))
    run.seen("b", failed=1)
    run.answered("a")
    assert (run.members, causes(run)) == (("a", "b"), [Cause.FAILURE])


def test_a_failure_waits_for_every_member_before_it_counts() -> None:
    run = running("a", "b", "c")
    run.failure(failure("b"))
    run.seen("b", failed=1)
    run.answered("a")
    assert causes(run) == []
    run.gone("c")
    assert (causes(run), run.members) == ([Cause.LOSS], ("a", "b"))
    assert run.generation is not None
    assert run.generation.restart_count == 0


def test_broken_collectives_with_all_alive_count_as_a_failure_after_the_probe_timeout() -> None:
    run = running("a", "b", probe_timeout=0.3)
    run.seen("a", broken=1)
    run.answered("b")
    assert causes(run) == []
    run.now = 0.3
    run.tick()
    assert (causes(run), run.members) == ([Cause.FAILURE], ("a", "b"))
    assert run.generation is not None
    assert run.generation.restart_count == 1


def test_a_consequence_is_never_the_root_cause() -> None:
    run = running("a", "b", max_restarts=0)
    run.failure(failure("a", rank=0, consequence=True, message="RuntimeError: connection closed by peer"))
    run.seen("a", failed=1)
    run.answered("b")
    run.failure(failure("b", exit_code=137, message="died by signal 9 (SIGKILL)"))
    assert run.closed == Closed(
        outcome=Outcome.FAILED,
        exit_code=137,
        reason="1 failure, budget 0: rank 1 on node b: died by signal 9 (SIGKILL) at train.py:12 "
        "after step 10",
    )


@pytest.mark.case("W04")
def test_losses_spend_nothing_and_the_run_ends_at_the_failure_beyond_the_budget() -> None:
    run = running("a", "b", "c", "d", max_restarts=1)
    for node in ("d", "c", "b"):
        run.gone(node)
        for member in run.members:
            run.answered(member)
        run.enter()
    assert (causes(run), run.members) == ([Cause.LOSS] * 3, ("a",))
    run.failure(failure("a", generation=4, step=20))
    assert causes(run)[-1] is Cause.FAILURE
    run.failure(failure("a", generation=5, step=30, exit_code=3))
    assert run.closed is not None
    assert (run.closed.outcome, run.closed.exit_code) == (Outcome.FAILED, 3)
    assert run.closed.reason.startswith("2 failures, budget 1: rank 1 on node a: ValueError: bad label 7")


def test_the_end_by_a_failure_waits_a_moment_for_what_it_did_to_the_others() -> None:
    run = running("a", "b", "c", max_restarts=0)
    run.failure(failure("a", exit_code=137))
    run.answered("b")
    run.answered("c")
    run.failure(failure("b", consequence=True))
    assert run.closed is None
    run.now += 0.9
    run.tick()
    assert run.closed is None
    run.failure(failure("c", consequence=True))
    assert run.closed is not None
    assert run.closed.exit_code == 137


def test_an_exception_before_any_group_ends_the_run_whatever_the_budget() -> None:
    run = running("a", "b")
    run.failure(failure("a", started=False, step=-1, message="SyntaxError: invalid syntax"))
    run.answered("b")
    run.now += 1.0
    run.tick()
    assert run.closed is not None
    assert run.closed.reason == (
        "failed before training began, a restart cannot mend it: "
        "rank 1 on node a: SyntaxError: invalid syntax at train.py:12 before its first step"
    )


def test_a_signal_before_any_group_may_be_chance_and_is_restarted() -> None:
    run = running("a", "b")
    run.failure(failure("a", started=False, step=-1, exit_code=137))
    run.answered("b")
    assert (run.closed, causes(run)) == (None, [Cause.FAILURE])


def test_a_failed_start_is_explained_by_a_lost_peer() -> None:
    run = running("a", "b")
    run.failure(failure("a", started=False, step=-1, message="DistStoreError: timeout"))
    run.gone("b")
    assert (run.closed, causes(run)) == (None, [Cause.LOSS])


def test_an_exception_in_the_set_up_before_the_first_generation_ends_the_run() -> None:
    run = scenario(min_nodes=2)
    run.seen("a", phase=NodePhase.WARMING)
    run.failure(failure("a", generation=0, started=False, step=-1))
    assert run.closed is not None
    assert (run.closed.outcome, run.closed.exit_code) == (Outcome.FAILED, 1)


def test_set_ups_that_die_by_a_signal_again_and_again_end_the_run() -> None:
    run = scenario(max_restarts=2)
    run.seen("a", phase=NodePhase.WARMING)
    for _ in range(2):
        run.failure(failure("a", generation=0, started=False, step=-1, exit_code=137))
        assert run.closed is None
    run.failure(failure("a", generation=0, started=False, step=-1, exit_code=137))
    assert run.closed is not None
    assert (run.closed.exit_code, run.closed.reason[:22]) == (137, "set-up failed 3 times:")


def test_a_joiner_s_failed_set_up_does_not_end_a_running_job() -> None:
    run = running("a")
    run.seen("b", phase=NodePhase.WARMING)
    run.failure(failure("b", generation=0, started=False, step=-1))
    assert (run.closed, run.members, causes(run)) == (None, ("a",), [])


def test_an_old_generation_s_failure_changes_nothing() -> None:
    run = running("a", "b")
    run.seen("b", phase=NodePhase.DRAINING)
    assert run.members == ("a",)
    assert run.failure(failure("a", generation=1)) == []


def test_failures_without_a_new_step_end_the_run_before_the_budget() -> None:
    run = running("a", max_restarts=10, no_progress_limit=3)
    for generation in (1, 2, 3):
        run.failure(failure("a", generation=generation, step=10))
        assert run.closed is None
    run.failure(failure("a", generation=4, step=10))
    assert run.closed is not None
    assert (run.closed.outcome, run.closed.exit_code) == (Outcome.NO_PROGRESS, 70)
    assert run.closed.reason.startswith("3 generations in a row failed without going beyond step 10: rank 1")


def test_a_new_step_between_failures_is_progress() -> None:
    run = running("a", max_restarts=10, no_progress_limit=2)
    for generation in range(1, 8):
        run.failure(failure("a", generation=generation, step=generation))
    assert run.closed is None


def test_a_script_that_reports_no_step_is_judged_by_its_budget_only() -> None:
    run = running("a", max_restarts=10, no_progress_limit=2)
    for generation in range(1, 8):
        run.failure(failure("a", generation=generation, step=-1))
    assert run.closed is None


def test_a_successor_remembers_that_there_is_no_progress() -> None:
    run = running("a", max_restarts=10, no_progress_limit=3)
    for generation in (1, 2, 3):
        run.failure(failure("a", generation=generation, step=10))
        run.take_over()
    run.failure(failure("a", generation=4, step=10))
    assert run.closed is not None
    assert run.closed.outcome is Outcome.NO_PROGRESS


def test_a_worker_that_failed_late_under_the_old_generation_is_replaced_without_a_second_restart() -> None:
    run = running("a", "b")
    fail(run, "a")
    run.answered("b")
    assert (run.members, causes(run)) == (("b",), [Cause.FAILURE])
    run.seen("a", phase=NodePhase.READY)
    run.seen("b", failed=1, phase=NodePhase.WARMING)
    assert (run.members, causes(run)) == (("a",), [Cause.FAILURE, Cause.LOSS])
    assert run.generation is not None
    assert run.generation.restart_count == 1
