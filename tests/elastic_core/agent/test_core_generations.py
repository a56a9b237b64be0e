"""The agent's machine: from its start into generations and out of them."""

from elastic_core.agent.events import (
    AgentStarted,
    Exit,
    ForkServerReady,
    NodeStatus,
    Register,
    Registered,
    ReplaceWorker,
    RunClosed,
    SendToWorkers,
    StartWorkers,
    StopWorkers,
    WakeAt,
    WarmForkServer,
    WorkerSpoke,
    WorkersStopped,
    WriteProgress,
    WriteResult,
    WriteResumption,
    WriteStatus,
)
from elastic_core.agent.table import AgentState
from elastic_core.model.membership import Cause
from elastic_core.model.messages import (
    EnterGeneration,
    LeaveGeneration,
    StepsResumed,
    TrainingFinished,
)
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import Resumption, RunResult
from tests.elastic_core.agent.scenes import (
    DIED,
    FENCED,
    ME,
    SIGTERM,
    STOP,
    SUCCEEDED,
    Scene,
    elastic,
    ended,
    failure_in,
    generation,
    left,
    part_of,
    progressed,
    published,
    raised,
    ready,
    scene,
    statuses,
    torchrun,
    without_me,
)

# ---- set-up ---------------------------------------------------------------------------------


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


# ---- generations ----------------------------------------------------------------------------


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
    assert training.tell(ended(0, 0)).acts == [WakeAt(at=training.now + 3600)], "they need not end at once"
    training.commands.clear()
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
