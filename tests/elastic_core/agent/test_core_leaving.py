"""The agent's machine: drains, stops and fences."""

import pytest

from elastic_core.agent.events import (
    AgentStarted,
    DrainRequested,
    Exit,
    ForceRequested,
    NodeStatus,
    Register,
    Registered,
    RunClosed,
    SendToWorkers,
    StartWorkers,
    StopWorkers,
    WakeAt,
    WorkersStopped,
    WriteStatus,
)
from elastic_core.agent.table import AgentState
from elastic_core.ids import NodeId
from elastic_core.model.membership import Cause
from elastic_core.model.messages import (
    LeaveGeneration,
    StopTraining,
)
from elastic_core.model.node import NodePhase
from tests.elastic_core.agent.scenes import (
    FAILED,
    FENCED,
    ME,
    SIGTERM,
    STOP,
    TICK,
    Scene,
    broke,
    elastic,
    ended,
    left,
    published,
    raised,
    ready,
    scene,
    statuses,
    torchrun,
    without_me,
)

# ---- drain ----------------------------------------------------------------------------------


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


# ---- stop -----------------------------------------------------------------------------------


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


# ---- fencing --------------------------------------------------------------------------------


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
