"""The coordinator, rule by rule; the golden traces show the same as whole stories."""

from dataclasses import replace

import pytest

from elastic_core.errors import IllegalEvent
from elastic_core.ids import LeaseId, NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Cause, Closed, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    FenceNode,
    NodeSeen,
    ProbeNodes,
    PublishGeneration,
    StoreView,
    Wait,
    WakeAt,
)
from elastic_core.testing.scenario import DEFAULT_POLICY, Scenario


def scenario(*, manual: bool = False, **policy: float) -> Scenario:
    return Scenario(replace(DEFAULT_POLICY, **policy), manual=manual)  # type: ignore[arg-type]


def running(*names: str, **policy: float) -> Scenario:
    """A run whose first generation is entered by the named nodes."""
    run = scenario(**policy)
    run.target(len(names))
    for name in names:
        run.seen(name)
    run.enter()
    assert run.members == names
    run.target(run.policy.max_nodes)
    run.commands.clear()
    return run


def failure(node: str, **changes: object) -> Failure:
    known: dict[str, object] = {
        "node_id": NodeId(node),
        "generation": 1,
        "rank": 1,
        "local_rank": 0,
        "exit_code": 1,
        "message": "ValueError: bad label 7",
        "location": "train.py:12",
        "step": 10,
        "started": True,
    }
    return Failure(**(known | changes))  # type: ignore[arg-type]


def fail(run: Scenario, node: str, **changes: object) -> list[CoordinatorCommand]:
    """A node reports a failed worker, as an elastic agent does: record and failure at once."""
    number = run.generation.number if run.generation else 0
    told = run.failure(failure(node, **({"generation": number} | changes)))
    return told + run.seen(node, failed=number, phase=NodePhase.WARMING)


def of(kind: type, commands: list[CoordinatorCommand]) -> list[CoordinatorCommand]:
    return [command for command in commands if isinstance(command, kind)]


def stay_silent(run: Scenario) -> list[CoordinatorCommand]:
    """Let the three rounds of an inquiry go by, the timer ringing as asked; return what follows."""
    commands: list[CoordinatorCommand] = []
    for _ in range(3):
        run.now += 0.101
        commands = run.tick()
    return commands


def causes(run: Scenario) -> list[Cause]:
    return [c.generation.cause for c in run.commands if isinstance(c, PublishGeneration)]


def lost(run: Scenario) -> dict[str, str]:
    entry = run.view.history
    return dict(entry.lost) if entry else {}


# ---- start -----------------------------------------------------------------------------------


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


# ---- joins, drains, targets ------------------------------------------------------------------


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


# ---- losses ----------------------------------------------------------------------------------


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


# ---- failures --------------------------------------------------------------------------------


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


# ---- the end ---------------------------------------------------------------------------------


def succeed(run: Scenario, node: str) -> list[CoordinatorCommand]:
    number = run.generation.number if run.generation else 0
    return run.seen(node, phase=NodePhase.SUCCEEDED, generation=number)


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


# ---- commits and take-over -------------------------------------------------------------------


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
