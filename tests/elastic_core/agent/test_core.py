from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_core.agent.core import AgentCore, diagram
from elastic_core.agent.events import (
    AgentPolicy,
    AgentStarted,
    DrainRequested,
    Exit,
    ForceRequested,
    ForkServerDied,
    ForkServerReady,
    LeaseEnded,
    NodeStatus,
    NodeUnfit,
    Register,
    Registered,
    ReplaceWorker,
    ReportFailure,
    RunClosed,
    SendToWorkers,
    StartWorkers,
    StopRequested,
    StopWorkers,
    StoreSilent,
    TimeAdvanced,
    WakeAt,
    WarmForkServer,
    WorkerSpoke,
    WorkersStopped,
    WriteProgress,
    WriteResult,
    WriteResumption,
    WriteStatus,
)
from elastic_core.agent.table import ROWS, AgentState
from elastic_core.errors import IllegalEvent
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause
from elastic_core.model.messages import (
    EnterGeneration,
    LeaveGeneration,
    StepsResumed,
    StopTraining,
    TrainingFinished,
)
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import Resumption, RunResult
from tests.elastic_core.agent.scenes import (
    FAILED,
    ME,
    SUCCEEDED,
    Scene,
    broke,
    elastic,
    ended,
    generation,
    left,
    part_of,
    progressed,
    published,
    raised,
    ready,
    torchrun,
    without_me,
)

SIGTERM = DrainRequested(reason="SIGTERM")
STOP = StopRequested(reason="asked by the flow")
FENCED = LeaseEnded(node_id=ME)
DIED = ForkServerDied(reason="the fork server was killed by signal 9")
TICK = TimeAdvanced()

scenes: list[Callable[[], None]] = []


def scene(test: Callable[[], None]) -> Callable[[], None]:
    """Keep a test for the check that every row of the table is told somewhere."""
    scenes.append(test)
    return test


def failure_in(scene: Scene) -> Failure:
    (report,) = [command for command in scene.commands if isinstance(command, ReportFailure)]
    return report.failure


def statuses(scene: Scene) -> list[NodeStatus]:
    return [
        command.status
        for command in scene.commands
        if isinstance(command, WriteStatus | ReportFailure | Register)
    ]


# ---- set-up ----------------------------------------------------------------------------------


@scene
def test_registering_and_warming_begin_together() -> None:
    started = Scene("torchrun").tell(AgentStarted())
    assert started.acts == [Register(status=NodeStatus(), renew=True), WarmForkServer()]


@scene
def test_workers_of_the_elastic_api_are_set_up_before_any_generation() -> None:
    started = Scene("elastic").tell(AgentStarted())
    assert started.acts[-1] == StartWorkers(part=None)
    registered = started.tell(Registered(node_id=ME))
    assert registered.state is AgentState.WARMING


@scene
def test_a_warm_fork_server_makes_a_torchrun_node_ready() -> None:
    warmed = Scene("torchrun").after([AgentStarted(), Registered(node_id=ME)]).tell(ForkServerReady())
    assert warmed.acts == [WriteStatus(status=NodeStatus(phase=NodePhase.READY))]
    assert warmed.state is AgentState.STANDBY


@scene
def test_a_node_that_was_set_up_while_it_registered_says_so_when_it_is() -> None:
    registered = Scene("torchrun").after([AgentStarted(), ForkServerReady()]).tell(Registered(node_id=ME))
    assert registered.acts == [WriteStatus(status=NodeStatus(phase=NodePhase.READY))]
    assert registered.state is AgentState.STANDBY


@scene
def test_an_elastic_node_is_ready_when_its_last_worker_is() -> None:
    warming = Scene("elastic", slots=2).after([AgentStarted(), Registered(node_id=ME), ForkServerReady()])
    assert warming.tell(ready(1)).acts == []
    assert warming.tell(ready(0)).acts == [WriteStatus(status=NodeStatus(phase=NodePhase.READY))]


@scene
def test_a_failed_set_up_before_the_first_generation_is_reported_and_tried_again() -> None:
    failed = Scene("elastic").after([AgentStarted(), Registered(node_id=ME), ForkServerReady()])
    failed.tell(raised(started=False), ended(1))
    assert failure_in(failed).generation == 0
    assert failure_in(failed).message == "ValueError: bad label 7"
    assert failed.acts[-1] == ReplaceWorker(local_rank=0)
    assert failed.state is AgentState.WARMING


@scene
def test_a_set_up_that_fails_three_times_ends_the_node_with_the_failure() -> None:
    failed = Scene("elastic").after([AgentStarted(), Registered(node_id=ME), ForkServerReady()])
    failed.tell(ended(-9), ended(-9), ended(-9), WorkersStopped())
    assert isinstance(failed.acts[-1], Exit)
    assert failed.acts[-1].code == 137
    assert "possibly out of memory" in failed.acts[-1].reason


@scene
def test_set_up_may_fail_while_the_node_registers() -> None:
    failing = Scene("elastic").after([AgentStarted()]).tell(ended(-9))
    assert (failing.state, failing.acts[-1]) == (AgentState.REGISTERING, ReplaceWorker(local_rank=0))
    assert failing.tell(ended(-9), ended(-9)).state is AgentState.LEAVING


@scene
def test_an_exception_in_set_up_beside_a_running_generation_ends_only_this_node() -> None:
    joiner = Scene("elastic").after(
        [AgentStarted(), Registered(node_id=ME), without_me(4), ForkServerReady()]
    )
    joiner.tell(raised(started=False), ended(1))
    assert joiner.acts == [StopWorkers(grace=1.0)]
    assert joiner.tell(WorkersStopped()).acts[-1].code == 1


@scene
def test_an_idle_worker_that_dies_is_replaced_and_the_node_is_not_ready_meanwhile() -> None:
    idle = elastic(without_me(3)).tell(ended(-11))
    assert statuses(idle)[-1].phase is NodePhase.WARMING
    assert idle.acts[-1] == ReplaceWorker(local_rank=0)
    assert idle.state is AgentState.WARMING


@scene
def test_an_idle_worker_that_raises_beside_a_running_generation_ends_the_node() -> None:
    assert elastic(without_me(3)).tell(raised(), ended(1)).state is AgentState.LEAVING


@scene
def test_a_fork_server_that_worked_is_replaced() -> None:
    for state in (torchrun(published(1)), torchrun(published(1), published(2))):
        before = state.state
        assert state.tell(DIED).acts == [WarmForkServer()]
        assert state.state is before


@scene
def test_a_node_without_a_fork_server_is_not_ready_until_there_is_another() -> None:
    standby = torchrun().tell(DIED)
    assert standby.acts == [WarmForkServer(), WriteStatus(status=NodeStatus(phase=NodePhase.WARMING))]
    assert standby.tell(published(1)).state is AgentState.WARMING
    assert standby.tell(ForkServerReady()).acts[-2] == StartWorkers(part=published(1))
    stopping = torchrun(published(1), ended(-9)).tell(DIED, WorkersStopped())
    assert statuses(stopping)[-1].phase is NodePhase.WARMING
    assert stopping.tell(ForkServerReady()).state is AgentState.STANDBY


@scene
def test_a_fork_server_that_never_became_warm_ends_the_node() -> None:
    warming = Scene("torchrun").after([AgentStarted(), Registered(node_id=ME)]).tell(DIED, WorkersStopped())
    assert warming.acts[-1] == Exit(
        code=1, reason="workers cannot be started here: the fork server was killed by signal 9"
    )
    assert Scene("torchrun").after([AgentStarted()]).tell(DIED).state is AgentState.LEAVING
    for state in (torchrun(published(1)), torchrun(published(1), published(2))):
        assert state.tell(DIED, DIED).state is AgentState.LEAVING


@scene
def test_a_fork_server_that_was_lost_in_set_up_is_replaced_and_workers_follow_it() -> None:
    warming = Scene("elastic").after([AgentStarted(), Registered(node_id=ME), ForkServerReady()])
    warming.tell(ended(-9), DIED)
    assert warming.acts[-2:] == [ReplaceWorker(local_rank=0), WarmForkServer()]
    registering = Scene("elastic").after([AgentStarted(), ForkServerReady()]).tell(ended(-9), DIED)
    assert registering.acts[-2:] == [ReplaceWorker(local_rank=0), WarmForkServer()]


# ---- generations -----------------------------------------------------------------------------


@scene
def test_workers_of_the_torchrun_contract_start_with_their_generation() -> None:
    entered = torchrun().tell(published(1))
    assert entered.acts == [
        StartWorkers(part=published(1)),
        WriteStatus(status=NodeStatus(phase=NodePhase.READY, generation=1)),
    ]


@scene
def test_workers_of_the_elastic_api_are_told_of_their_generation() -> None:
    entered = elastic().tell(published(1))
    assert entered.acts == [
        SendToWorkers(message=EnterGeneration(generation=generation(1), assignment=part_of(1))),
        WriteStatus(status=NodeStatus(phase=NodePhase.READY, generation=1)),
    ]


@scene
def test_survivors_of_the_elastic_api_go_on_without_being_stopped() -> None:
    entered = elastic(published(1)).tell(published(2))
    assert [type(command) for command in entered.acts] == [SendToWorkers, WriteStatus]
    assert entered.state is AgentState.TRAINING


@scene
def test_a_generation_without_this_node_makes_it_a_standby_that_stays_set_up() -> None:
    released = elastic(published(1)).tell(without_me(2))
    assert released.acts == [SendToWorkers(message=LeaveGeneration(generation=2, cause=Cause.START))]
    assert released.state is AgentState.STANDBY
    assert released.tell(left(1), published(3)).state is AgentState.TRAINING


@scene
def test_a_standby_beyond_the_maximum_starts_no_worker_and_is_promoted() -> None:
    standby = torchrun().tell(without_me(1))
    assert standby.acts == []
    assert standby.tell(published(2)).acts[0] == StartWorkers(part=published(2))


@scene
def test_a_generation_that_came_before_the_workers_were_set_up_is_entered_when_they_are() -> None:
    waiting = Scene("elastic").after(
        [AgentStarted(), Registered(node_id=ME), ForkServerReady(), published(1)]
    )
    assert waiting.tell(ready()).state is AgentState.TRAINING


@scene
def test_the_generation_in_which_a_worker_failed_is_not_entered_again() -> None:
    failed = elastic(published(1), ended(-9)).tell(ready())
    assert failed.state is AgentState.STANDBY
    assert failed.acts == [WriteStatus(status=NodeStatus(phase=NodePhase.READY, generation=1, failed=1))]


@scene
def test_workers_of_one_generation_end_before_those_of_the_next_start() -> None:
    stopping = torchrun(published(1)).tell(published(2))
    assert stopping.acts == [StopWorkers(grace=30.0)]
    stopping.tell(ended(-15), WorkersStopped())
    assert stopping.acts[1] == StartWorkers(part=published(2))
    assert stopping.state is AgentState.TRAINING


@scene
def test_of_two_generations_that_come_while_workers_end_only_the_newest_is_entered() -> None:
    stopping = torchrun(published(1), published(2)).tell(published(3), WorkersStopped())
    assert stopping.acts[0] == StartWorkers(part=published(3))


@scene
def test_workers_that_end_for_a_generation_without_this_node_leave_it_standing_by() -> None:
    assert torchrun(published(1)).tell(without_me(2), WorkersStopped()).state is AgentState.STANDBY


def test_an_older_generation_is_never_entered() -> None:
    assert elastic(published(5)).tell(published(4)).acts == []
    assert torchrun(published(5)).tell(published(5)).acts == []


@scene
def test_a_node_whose_workers_all_ended_well_says_so_and_waits() -> None:
    training = torchrun(published(1, slots=2), slots=2)
    assert training.tell(ended(0, 0)).acts == []
    training.tell(ended(0, 1))
    assert training.acts == [WriteStatus(status=NodeStatus(phase=NodePhase.SUCCEEDED, generation=1))]
    assert training.tell(RunClosed(closed=SUCCEEDED)).acts[-1] == Exit(code=0, reason="done")


def test_success_names_the_generation_in_which_rank_zero_really_trained() -> None:
    training = elastic(published(1), progressed(1, 20), published(2)).tell(ended(0))
    assert statuses(training) == [NodeStatus(phase=NodePhase.SUCCEEDED, generation=1, step=20)]


@scene
def test_a_finished_node_that_loses_its_lease_writes_its_success_again_under_its_id() -> None:
    finished = torchrun(published(1), ended(0)).tell(FENCED)
    status = NodeStatus(phase=NodePhase.SUCCEEDED, generation=1)
    assert finished.acts == [Register(status=status, renew=False)]
    assert finished.tell(Registered(node_id=ME)).state is AgentState.FINISHED


@scene
def test_only_the_node_of_rank_zero_tells_of_the_run() -> None:
    resumption = Resumption(
        generation=1, last_step_at=0, noticed_at=0, assigned_at=1, formed_at=2, synced_at=3,
        first_step_at=4, step_before=-1, step_resumed=0, source="fresh",
    )  # fmt: skip
    result = RunResult(epochs=1, steps=9, samples=72)
    told = (
        progressed(1, 3),
        WorkerSpoke(local_rank=0, message=StepsResumed(resumption=resumption)),
        WorkerSpoke(local_rank=0, message=TrainingFinished(result=result)),
    )
    first = elastic(published(1)).tell(*told)
    assert [type(command) for command in first.acts] == [WriteProgress, WriteResumption, WriteResult]
    assert elastic(published(1, first_rank=1)).tell(*told).acts == []


@scene
def test_another_ranks_progress_is_remembered_for_its_failure_and_not_told() -> None:
    beside = elastic(published(1), slots=2).tell(progressed(1, 3, local_rank=1))
    assert beside.acts == []
    elsewhere = elastic(published(1, first_rank=1)).tell(progressed(1, 10), ended(-9))
    assert failure_in(elsewhere).headline().endswith("after step 10")


@scene
def test_what_rank_zero_tells_while_it_ends_is_not_lost() -> None:
    told = [
        progressed(1, 3),
        WorkerSpoke(local_rank=0, message=TrainingFinished(result=RunResult(epochs=1, steps=9, samples=72))),
        WorkerSpoke(
            local_rank=0,
            message=StepsResumed(
                resumption=Resumption(
                    generation=1, last_step_at=0, noticed_at=0, assigned_at=1, formed_at=2, synced_at=3,
                    first_step_at=4, step_before=-1, step_resumed=0, source="fresh",
                )
            ),
        ),
    ]  # fmt: skip
    for ending in (
        elastic(published(1), SIGTERM),
        elastic(published(1), STOP),
        elastic(published(1), SIGTERM, without_me(2)),
        torchrun(published(1), published(2)),
    ):
        ending.commands = []
        assert [type(command) for command in ending.tell(*told).acts] == [
            WriteProgress, WriteResult, WriteResumption,
        ]  # fmt: skip


# ---- failures --------------------------------------------------------------------------------


@scene
def test_a_broken_collective_is_reported_once_a_generation() -> None:
    broken = elastic(published(1), slots=1).tell(broke(1, step=7), broke(1))
    assert broken.acts == [
        WriteStatus(status=NodeStatus(phase=NodePhase.READY, generation=1, broken=1, step=7))
    ]


@pytest.mark.case("W02")
@scene
def test_a_killed_worker_of_the_elastic_api_is_reported_and_replaced_at_once() -> None:
    failed = elastic(published(1), progressed(1, 10)).tell(ended(-9))
    failure = failure_in(failed)
    assert failure.headline() == (
        "rank 0 on node a.1: died by signal 9 (SIGKILL), possibly out of memory after step 10"
    )
    assert (failure.exit_code, failure.consequence, failure.generation) == (137, False, 1)
    assert statuses(failed) == [NodeStatus(phase=NodePhase.WARMING, generation=1, failed=1, step=10)]
    assert failed.acts[-1] == ReplaceWorker(local_rank=0)


@scene
def test_what_a_worker_says_of_its_failure_is_reported_before_its_process_ends_and_only_once() -> None:
    failed = elastic(published(1, first_rank=1)).tell(raised(), ended(1))
    assert failure_in(failed).headline() == ("rank 1 on node a.1: ValueError: bad label 7 at train.py:12")
    assert failed.acts[-1] == ReplaceWorker(local_rank=0)
    assert failed.state is AgentState.WARMING


@scene
def test_a_failed_worker_of_the_torchrun_contract_ends_its_local_peers() -> None:
    failed = torchrun(published(1, slots=2), slots=2).tell(ended(3, 1))
    assert failure_in(failed).exit_code == 3
    assert failed.acts[-1] == StopWorkers(grace=30.0)
    assert statuses(failed) == [NodeStatus(phase=NodePhase.READY, generation=1, failed=1)]
    assert failed.tell(ended(-15, 0), WorkersStopped()).state is AgentState.STANDBY
    assert len([command for command in failed.commands if isinstance(command, ReportFailure)]) == 1


@scene
def test_the_root_cause_replaces_a_consequence_that_was_reported_first() -> None:
    failing = torchrun(published(1, slots=2), slots=2).tell(raised(1, consequence=True))
    assert failure_in(failing).consequence
    failing.commands = []
    failing.tell(ended(-9, 0))
    assert failure_in(failing).message == "died by signal 9 (SIGKILL), possibly out of memory"
    failing = torchrun(published(1, slots=2), slots=2).after([raised(1, consequence=True)])
    assert failure_in(failing.tell(raised(0))).message == "ValueError: bad label 7"


@scene
def test_what_follows_from_a_reported_root_cause_is_not_reported() -> None:
    failing = torchrun(published(1, slots=2), slots=2).after([raised(1)])
    assert failing.tell(raised(0), ended(1, 1), ended(1, 0)).acts == []


def test_a_worker_that_was_killed_after_its_grace_is_a_consequence() -> None:
    failing = torchrun(published(1, slots=2), slots=2).after([raised(1, consequence=True)])
    assert failing.wait(31).tell(ended(-9, 0)).acts == []


@scene
def test_an_unreadable_program_ends_only_this_node() -> None:
    for state in (torchrun(published(1)), torchrun(), Scene("elastic").tell(AgentStarted())):
        unfit = state.tell(NodeUnfit(reason="script 'x.py' cannot be read"), WorkersStopped())
        assert unfit.acts[-1] == Exit(code=1, reason="script 'x.py' cannot be read")
    warming = Scene("elastic").after([AgentStarted(), Registered(node_id=ME)])
    assert warming.tell(NodeUnfit(reason="script")).state is AgentState.LEAVING


# ---- drain -----------------------------------------------------------------------------------


@scene
def test_a_draining_node_trains_on_until_the_others_go_on_without_it() -> None:
    draining = elastic(published(1)).tell(SIGTERM)
    assert draining.acts == [
        WriteStatus(status=NodeStatus(phase=NodePhase.DRAINING, generation=1)),
        WakeAt(at=102.0),
    ]
    draining.commands = []
    draining.tell(without_me(2))
    assert draining.acts == [
        SendToWorkers(message=LeaveGeneration(generation=2, cause=Cause.START)),
        WakeAt(at=130.0),
    ]
    draining.commands = []
    draining.tell(left(1), ended(-15), WorkersStopped())
    assert draining.acts == [StopWorkers(grace=1.0), Exit(code=75, reason="drained: SIGTERM")]


@scene
def test_a_drained_worker_that_does_not_leave_is_killed_after_the_grace() -> None:
    leaving = elastic(published(1), SIGTERM, without_me(2)).after([])
    leaving.wait(31).tell(TICK)
    assert leaving.acts[-1] == StopWorkers(grace=0)


@scene
def test_a_drain_that_nobody_answers_saves_and_leaves_after_two_seconds() -> None:
    alone = elastic(published(1)).tell(SIGTERM).wait(2.0).tell(TICK)
    assert alone.acts[-2] == SendToWorkers(message=StopTraining(save=True, reason="the node is drained"))
    alone.tell(left(1), ended(0), WorkersStopped())
    assert alone.acts[-1].code == 75


@pytest.mark.case("G06")
def test_a_notice_stands_in_the_record_and_bounds_the_grace_by_what_the_machine_still_has() -> None:
    node = elastic(published(1))
    node.tell(DrainRequested(reason="spot", notice="spot interruption", leave_by=node.now + 8))
    assert statuses(node)[-1].notice == "spot interruption"
    node.wait(2).tell(TICK)
    assert node.acts[-1] == WakeAt(at=108.0), "not 30 s after the request, but when the machine goes"


@pytest.mark.case("G06")
def test_a_notice_of_a_machine_that_goes_at_once_leaves_without_a_grace() -> None:
    node = elastic(published(1))
    node.tell(DrainRequested(reason="spot", notice="spot interruption", leave_by=node.now - 1))
    node.tell(TICK, TICK)
    assert node.acts[-1] == StopWorkers(grace=0)


@scene
def test_a_drain_of_torchrun_workers_gives_them_their_grace_to_save() -> None:
    for fact in (TICK, without_me(2), published(2)):
        draining = torchrun(published(1), SIGTERM).after([]).wait(2.0).tell(fact)
        assert draining.acts[-1] == StopWorkers(grace=30.0)
        assert draining.wait(5.0).tell(TICK).acts[-1] == StopWorkers(grace=30.0)


@scene
def test_a_draining_node_helps_a_generation_form_that_was_decided_before() -> None:
    draining = elastic(published(1), SIGTERM).after([]).tell(published(2))
    assert draining.acts[1] == WriteStatus(status=NodeStatus(phase=NodePhase.DRAINING, generation=2))
    assert draining.state is AgentState.DRAINING


@scene
def test_a_draining_node_reports_broken_collectives_too() -> None:
    draining = elastic(published(1), SIGTERM).after([]).tell(broke(1))
    assert statuses(draining) == [NodeStatus(phase=NodePhase.DRAINING, generation=1, broken=1, step=7)]


@scene
def test_a_worker_that_fails_while_its_node_drains_makes_it_leave_at_once() -> None:
    assert elastic(published(1), SIGTERM).tell(raised()).state is AgentState.LEAVING
    assert elastic(published(1), SIGTERM).tell(ended(-9)).state is AgentState.LEAVING


@scene
def test_training_that_ends_while_its_node_drains_counts_as_success() -> None:
    draining = torchrun(published(1, slots=2), SIGTERM, ended(0, 0), slots=2).after([])
    draining.tell(ended(0, 1), WorkersStopped())
    assert statuses(draining)[-1].phase is NodePhase.SUCCEEDED
    assert draining.acts[-1].code == 0


@scene
def test_an_idle_node_leaves_at_once() -> None:
    for idle in (elastic(), Scene("elastic").after([AgentStarted(), Registered(node_id=ME)])):
        idle.tell(SIGTERM, WorkersStopped())
        assert idle.acts[-1] == Exit(code=75, reason="drained: SIGTERM")


@scene
def test_a_node_leaves_also_while_its_workers_change_or_it_is_not_registered() -> None:
    changing = torchrun(published(1), published(2)).tell(SIGTERM, WorkersStopped())
    assert changing.acts[-1].code == 75
    for fact in (SIGTERM, STOP):
        registering = Scene("torchrun").tell(AgentStarted(), fact, WorkersStopped())
        assert registering.acts[-1].code == 75
        fenced = elastic(published(1), FENCED).tell(fact, ended(0), WorkersStopped())
        assert fenced.acts[-1].code == 75


@scene
def test_a_finished_node_that_is_drained_ends_well() -> None:
    assert torchrun(published(1), ended(0)).tell(SIGTERM).acts[-1].code == 0


@scene
def test_a_second_signal_kills_in_every_state() -> None:
    force = ForceRequested(exit_code=143, reason="second SIGTERM")
    for state in (
        Scene("torchrun").tell(AgentStarted()),
        Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)),
        torchrun(),
        torchrun(published(1)),
        torchrun(published(1), published(2)),
        torchrun(published(1), ended(0)),
        elastic(published(1), SIGTERM),
        elastic(published(1), STOP),
        elastic(published(1), STOP, ended(0), WorkersStopped()),
        elastic(published(1), FENCED),
        elastic(published(1), SIGTERM, without_me(2)),
    ):
        state.after([]).tell(force, WorkersStopped())
        assert state.acts == [StopWorkers(grace=0), Exit(code=143, reason="second SIGTERM")]


# ---- stop ------------------------------------------------------------------------------------


@scene
def test_a_stop_saves_then_waits_for_the_outcome_and_ends_with_it() -> None:
    stopped = elastic(published(1)).tell(STOP)
    assert stopped.acts == [
        SendToWorkers(message=StopTraining(save=True, reason="asked by the flow")),
        WakeAt(at=130.0),
    ]
    stopped.tell(left(1), ended(0))
    assert stopped.acts[-1] == StopWorkers(grace=0)
    stopped.tell(WorkersStopped())
    assert statuses(stopped)[-1] == NodeStatus(phase=NodePhase.DRAINING, generation=0, step=9)
    assert stopped.tell(RunClosed(closed=FAILED)).acts[-1] == Exit(code=3, reason="1 failure, budget 0")


@scene
def test_a_stop_gives_torchrun_workers_their_grace() -> None:
    assert torchrun(published(1)).tell(STOP).acts == [StopWorkers(grace=30.0)]
    draining = torchrun(published(1), SIGTERM).after([]).tell(STOP).wait(5).tell(TICK)
    assert draining.acts == [StopWorkers(grace=30.0)]


@scene
def test_a_stop_ends_idle_and_changing_nodes_too() -> None:
    for state in (
        torchrun(),
        torchrun(published(1), published(2)),
        Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)),
    ):
        assert state.tell(STOP, WorkersStopped()).state is AgentState.STOPPED


@scene
def test_workers_that_do_not_end_by_a_stop_are_killed_after_the_grace() -> None:
    halting = elastic(published(1), STOP).after([]).wait(30.0).tell(TICK)
    assert halting.acts == [StopWorkers(grace=0)]


@scene
def test_a_stopped_node_leaves_when_nobody_can_tell_the_outcome() -> None:
    stopped = (STOP, ended(0), WorkersStopped())
    for fact in (FENCED, SIGTERM):
        assert elastic(published(1), *stopped).tell(fact).acts[-1].code == 75
    assert elastic(published(1), *stopped).wait(76.0).tell(TICK).acts[-1].code == 75
    halting = elastic(published(1), STOP).tell(FENCED, ended(0), WorkersStopped())
    assert halting.acts[-1].code == 75


# ---- fencing ---------------------------------------------------------------------------------


@scene
def test_a_fenced_node_stops_its_workers_before_it_comes_back_under_a_new_id() -> None:
    fenced = elastic(published(3)).tell(FENCED)
    assert fenced.acts == [
        SendToWorkers(message=StopTraining(save=True, reason="the node's lease ended")),
        WakeAt(at=130.0),
    ]
    fenced.commands = []
    fenced.tell(ended(0), WorkersStopped())
    assert fenced.acts == [
        StopWorkers(grace=0),
        Register(status=NodeStatus(step=0), renew=True),
        StartWorkers(part=None),
    ]
    back = fenced.tell(Registered(node_id=NodeId("a.2")), ready())
    assert back.state is AgentState.STANDBY
    assert back.tell(published(4)).state is AgentState.TRAINING


@scene
def test_a_fenced_worker_is_killed_as_soon_as_others_train_without_it_or_the_grace_is_over() -> None:
    fenced = elastic(published(3), FENCED).after([]).tell(without_me(4))
    assert fenced.acts == [StopWorkers(grace=0)]
    fenced = elastic(published(3), FENCED).after([]).wait(30.0).tell(TICK)
    assert fenced.acts == [StopWorkers(grace=0)]


@scene
def test_a_fenced_node_without_work_comes_back_too() -> None:
    for idle in (
        torchrun(),
        torchrun(published(1), published(2)),
        Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)),
    ):
        assert isinstance(idle.tell(FENCED, WorkersStopped()).acts[-1], Register)


@scene
def test_a_draining_node_that_is_fenced_saves_and_leaves() -> None:
    fenced = elastic(published(1), SIGTERM).after([]).tell(FENCED)
    assert fenced.acts[0] == SendToWorkers(message=StopTraining(save=True, reason="the node's lease ended"))
    assert fenced.tell(ended(0), WorkersStopped()).acts[-1] == Exit(code=75, reason="drained: SIGTERM")


# ---- the end ---------------------------------------------------------------------------------


@scene
def test_a_closed_run_ends_every_agent_with_its_code() -> None:
    closed = RunClosed(closed=FAILED)
    for state in (
        Scene("torchrun"),
        Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)),
        torchrun(),
        torchrun(published(1)),
        torchrun(published(1), published(2)),
        elastic(published(1), SIGTERM),
        elastic(published(1), STOP),
        elastic(published(1), FENCED),
    ):
        state.after([]).tell(closed, WorkersStopped())
        assert state.acts == [StopWorkers(grace=5.0), Exit(code=3, reason="1 failure, budget 0")]


@scene
def test_an_agent_that_has_nothing_to_do_ends_when_the_store_stays_away() -> None:
    silent = StoreSilent(seconds=601)
    for state, code in (
        (Scene("torchrun").tell(AgentStarted()), 69),
        (Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)), 69),
        (torchrun(), 69),
        (torchrun(published(1), STOP, WorkersStopped()), 69),
        (torchrun(published(1), ended(0)), 0),
    ):
        state.after([]).tell(silent, WorkersStopped())
        assert state.acts[-1] == Exit(code=code, reason="the store did not answer for 601 s")


def test_training_goes_on_however_long_the_store_stays_away() -> None:
    assert torchrun(published(1)).tell(StoreSilent(seconds=9_000)).acts == []


def test_late_facts_change_nothing_once_the_agent_has_ended() -> None:
    over = torchrun(published(1), ended(0), RunClosed(closed=SUCCEEDED)).after([])
    for fact in (
        SIGTERM,
        STOP,
        FENCED,
        DIED,
        TICK,
        ended(-9),
        WorkersStopped(),
        published(2),
        broke(1),
        raised(),
    ):
        assert over.tell(fact).acts == []
    assert over.state is AgentState.ENDED


def test_a_fact_that_cannot_be_is_refused_with_the_story_and_changes_nothing() -> None:
    agent = AgentCore(AgentPolicy(slots=1, api="torchrun"))
    agent.handle(AgentStarted(), 1.0)
    agent.handle(Registered(node_id=ME), 2.0)
    with pytest.raises(IllegalEvent, match=r"(?s)no transition from warming on AgentStarted.*Registered"):
        agent.handle(AgentStarted(), 3.0)
    assert agent.state is AgentState.WARMING


def test_every_row_of_the_table_is_told_by_a_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()
    handle = AgentCore.handle

    def noting(core: AgentCore, *arguments: object) -> object:
        commands = handle(core, *arguments)  # type: ignore[arg-type]
        taken.add(id(core.taken))
        return commands

    monkeypatch.setattr(AgentCore, "handle", noting)
    for tell in scenes:
        tell()
    missed = [f"{row.state} {row.fact.__name__} {row.when}" for row in ROWS if id(row) not in taken]
    assert missed == []


def test_the_picture_in_the_docs_is_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agent.md").read_text()
    assert f"```mermaid\n{diagram()}\n```" in page, "run: python -m elastic_core.agent.core"
