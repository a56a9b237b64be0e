"""The agent's machine: workers that fail, and what is told of them."""

import pytest

from elastic_core.agent.events import (
    AgentStarted,
    Exit,
    KillWorker,
    NodeStatus,
    NodeUnfit,
    Registered,
    ReplaceWorker,
    ReportFailure,
    Say,
    StopWorkers,
    WakeAt,
    WorkerHung,
    WorkerSpoke,
    WorkersStopped,
    WritePace,
    WriteStatus,
)
from elastic_core.agent.table import AgentState
from elastic_core.model.messages import PaceChanged
from elastic_core.model.node import NodePhase
from tests.elastic_core.agent.scenes import (
    ME,
    SIGTERM,
    TICK,
    Scene,
    broke,
    elastic,
    ended,
    failure_in,
    progressed,
    published,
    raised,
    ready,
    scene,
    statuses,
    torchrun,
    without_me,
)
from tests.elastic_core.planning.test_slowness import SLOW


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


@pytest.mark.case("W10")
@scene
def test_a_local_rank_that_never_ends_after_another_ended_well_fails() -> None:
    node = torchrun(published(1), slots=2).tell(ended(0))
    assert node.acts == [WakeAt(at=node.now + 3600)]
    node.wait(3600).tell(TICK)
    failure = failure_in(node)
    assert failure.message == "rank 0 ended with code 0, this one still runs 3600 s later"
    assert (failure.rank, failure.consequence, failure.exit_code) == (1, False, 1)
    assert node.acts[-1] == StopWorkers(grace=30.0)


@pytest.mark.case("W10")
def test_a_collective_that_breaks_since_a_local_rank_ended_well_is_that_rank_s_doing() -> None:
    node = torchrun(published(1), slots=2).tell(ended(0), raised(1, consequence=True, message="peer closed"))
    failure = failure_in(node)
    assert failure.message == "rank 0 ended with code 0 before the others: peer closed"
    assert not failure.consequence


@scene
def test_workers_that_ended_well_in_a_generation_that_failed_are_set_up_again() -> None:
    node = elastic(published(1), slots=2).tell(ended(0), ended(-9, 1))
    assert node.acts[-2:] == [ReplaceWorker(local_rank=1), ReplaceWorker(local_rank=0)]
    node.tell(ready(0), ready(1))
    assert statuses(node)[-1].phase is NodePhase.READY


HUNG = WorkerHung(
    local_rank=0, pid=7, seconds=31.4, step=12, is_stopped=False, place="train.py:40", stacks="Current thread"
)


@pytest.mark.case("W06")
@scene
def test_a_hung_worker_is_killed_and_its_death_is_told_as_the_hang() -> None:
    for node in (elastic(published(1)), torchrun(published(1))):
        node.tell(HUNG)
        assert node.acts[-1] == KillWorker(local_rank=0, pid=7)
        node.tell(ended(-9))
        failure = failure_in(node)
        assert failure.headline() == "rank 0 on node a.1: hung: no step for 31 s at train.py:40 after step 12"
        assert (failure.exit_code, failure.consequence, failure.traceback) == (137, False, "Current thread")


@scene
def test_a_hung_worker_of_a_draining_node_does_not_hold_it_up() -> None:
    node = elastic(published(1), SIGTERM).tell(HUNG)
    assert node.acts[-1] == KillWorker(local_rank=0, pid=7)
    node.tell(ended(-9))
    assert node.state is AgentState.LEAVING


def test_a_hang_that_is_told_when_the_worker_trains_no_more_means_nothing() -> None:
    node = elastic(published(1), without_me(2)).tell(HUNG)
    assert node.acts == []


def test_the_worker_that_takes_the_place_of_a_hung_one_fails_for_reasons_of_its_own() -> None:
    node = elastic(published(1), HUNG, ended(-9))
    node.tell(ended(1))
    (said,) = [command.text for command in node.commands if isinstance(command, Say)]
    assert said == "set-up failed, trying again: rank 0 on node a.1: ended with code 1"


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


@scene
def test_a_worker_that_finds_itself_slow_is_told_also_while_its_node_leaves() -> None:
    slow = WorkerSpoke(local_rank=0, message=PaceChanged(slow=SLOW))
    for node in (elastic(published(1)), elastic(published(1), SIGTERM)):
        state = node.state
        node.tell(slow)
        assert node.commands[-2:] == [Say(text=SLOW.headline()), WritePace(slow=SLOW)]
        assert node.state is state
