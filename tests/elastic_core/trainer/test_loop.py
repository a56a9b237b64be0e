from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_core.model.job import CheckpointPolicy
from elastic_core.model.membership import Cause
from elastic_core.model.messages import (
    GenerationLeft,
    GroupBroken,
    PaceChanged,
    ProgressMade,
    StepsResumed,
    TrainingFinished,
)
from elastic_core.testing.sessions import Sessions
from elastic_core.testing.toy_trainee import ToyJob, ToyTrainee
from elastic_core.testing.toy_worker import Act
from elastic_core.trainer.classy.solo import SoloReducer
from tests.elastic_core.trainer.audit import read_audit, read_lines, read_metrics

JOB = ToyJob()
STEPS = 21


def undisturbed(job: ToyJob) -> dict[str, torch.Tensor]:
    trainee, alone = ToyTrainee(job), SoloReducer()
    trainee.set_up()
    while trainee.step < trainee.total_steps:
        trainee.train_step(alone)
        if trainee.evaluation_due():
            trainee.evaluate(alone)
    return trainee.model.state_dict()


def difference(run_dir: Path, job: ToyJob) -> float:
    """Return the largest difference of any weight from the undisturbed training's."""
    weights, expected = torch.load(run_dir / "model" / "model.pt", weights_only=True), undisturbed(job)
    return max(float((weights[name] - expected[name]).abs().max()) for name in expected)


@pytest.mark.slow
def test_one_worker_trains_to_the_end_and_hands_over_the_model(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        node = run.start("a")
        run.publish(node)
        result = node.wait_for(TrainingFinished).result
        assert node.exit_code() == 0
    assert (result.steps, result.epochs, result.samples) == (STEPS, 3, 150)
    assert result.metrics["test_samples"] == 50
    assert difference(tmp_path, JOB) == 0
    assert read_audit(tmp_path).is_exactly_once(50, 3)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(STEPS))
    assert read_metrics(tmp_path)[-1]["samples"] == 150


@pytest.mark.case("R03")
def test_a_node_that_joins_at_a_boundary_costs_no_step(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        gate = run.gate(5)
        first, second = run.start("a", gate.act), run.start("b")
        run.publish(first)
        gate.wait()
        run.publish(first, second, cause=Cause.JOIN)
        gate.open()
        first.wait_for(TrainingFinished)
        assert (first.exit_code(), second.exit_code()) == (0, 0)
        assert not [message for message in first.heard if isinstance(message, GroupBroken)]
        resumed = [message.resumption for message in first.heard if isinstance(message, StepsResumed)]
    assert [resumption.source for resumption in resumed] == ["fresh", "memory"]
    assert resumed[1].step_resumed == resumed[1].step_before + 1 >= 6
    told = [message.progress.step for message in second.heard if isinstance(message, ProgressMade)]
    assert told[0] == resumed[1].step_resumed + 1
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []
    assert difference(tmp_path, JOB) < 1e-12
    assert {line["world_size"] for line in read_metrics(tmp_path)} == {1, 2}


@pytest.mark.case("R01")
@pytest.mark.slow
def test_a_released_node_leaves_at_a_boundary_and_says_so(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        gate = run.gate(5)
        first, second = run.start("a", gate.act), run.start("b")
        run.publish(first, second)
        gate.wait()
        run.publish(first, cause=Cause.DRAIN)
        gate.open()
        left = second.wait_for(GenerationLeft)
        first.wait_for(TrainingFinished)
        second.stop()
        assert (first.exit_code(), second.exit_code()) == (0, 75)
    assert left.generation == 1
    assert left.step >= 6
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []
    assert difference(tmp_path, JOB) < 1e-12


def test_a_survivor_goes_on_from_its_memory_when_its_peer_is_killed(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        first, second = run.start("a"), run.start("b", Act(8, "die"))
        run.publish(first, second)
        broken = first.wait_for(GroupBroken)
        run.publish(first, cause=Cause.LOSS)
        resumed = first.wait_for(StepsResumed).resumption
        first.wait_for(TrainingFinished)
        assert (first.exit_code(), second.exit_code()) == (0, -signal.SIGKILL)
    assert broken.step == 8
    assert (resumed.step_before, resumed.step_resumed, resumed.source) == (7, 8, "memory")
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []
    assert difference(tmp_path, JOB) < 1e-12


def test_a_survivor_of_a_frozen_peer_is_freed_by_the_next_generation(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        first, second = run.start("a"), run.start("b", Act(8, "freeze"))
        run.publish(first, second)
        second.wait_until_frozen()
        first.wait_until_stuck()
        start = time.monotonic()
        run.publish(first, cause=Cause.LOSS)
        resumed = first.wait_for(StepsResumed, lambda message: message.resumption.generation == 2).resumption
        seconds = time.monotonic() - start
        first.wait_for(TrainingFinished)
        assert first.exit_code() == 0
    assert seconds < 0.5
    assert resumed.step_resumed == 8
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []


@pytest.mark.slow
def test_a_thawed_worker_learns_that_its_group_is_gone(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        gate = run.gate(10)
        first, second = run.start("a", gate.act), run.start("b", Act(8, "freeze"))
        run.publish(first, second)
        second.wait_until_frozen()
        run.publish(first, cause=Cause.LOSS)
        gate.wait()
        second.signal(signal.SIGCONT)
        assert second.wait_for(GenerationLeft).step == 8
        run.publish(second, first, cause=Cause.JOIN)  # rank 0 is the one that lags behind
        gate.open()
        second.wait_for(TrainingFinished)
        assert (first.exit_code(), second.exit_code()) == (0, 0)
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []


@pytest.mark.slow
def test_a_stopped_training_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        gate = run.gate(9)
        nodes = [run.start("a", gate.act), run.start("b")]
        run.publish(*nodes)
        gate.wait()
        for node in nodes:
            node.stop()
        gate.open()
        left = [node.wait_for(GenerationLeft) for node in nodes]
        assert [node.exit_code() for node in nodes] == [75, 75]
    assert left[0].step == left[1].step >= 10
    assert [message.saved for message in left] == [True, True]
    with Sessions(tmp_path, JOB, attempt=2) as run:
        node = run.start("c")
        run.publish(node)
        resumed = node.wait_for(StepsResumed).resumption
        node.wait_for(TrainingFinished)
    assert (resumed.source, resumed.step_resumed) == ("checkpoint", left[0].step)
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == []
    assert difference(tmp_path, JOB) < 1e-12


@pytest.mark.slow
def test_sigterm_to_a_worker_saves_and_stops(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        gate = run.gate(9)
        node = run.start("a", gate.act)
        run.publish(node)
        gate.wait()
        node.signal(signal.SIGTERM)
        gate.open()
        assert node.wait_for(GenerationLeft).saved
        assert node.exit_code() == 75
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] != []


@pytest.mark.slow
def test_a_stop_between_two_generations_still_saves(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        first, second = run.start("a"), run.start("b", Act(8, "die"))
        run.publish(first, second)
        first.wait_for(GroupBroken)
        first.stop()
        left = first.wait_for(GenerationLeft)
        assert first.exit_code() == 75
    assert (left.step, left.saved) == (8, True)
    assert (tmp_path / "checkpoints" / "step-00000008-a1-g1" / "manifest.json").exists()


@pytest.mark.slow
def test_a_worker_that_is_lost_with_all_others_costs_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB, policy=CheckpointPolicy(every_steps=5)) as run:
        node = run.start("a", Act(12, "die"))
        run.publish(node)
        assert node.exit_code() == -signal.SIGKILL
        other = run.start("b")
        run.publish(other, cause=Cause.LOSS)
        resumed = other.wait_for(StepsResumed).resumption
        other.wait_for(TrainingFinished)
    assert resumed.source == "checkpoint"
    assert resumed.step_resumed in (5, 10)  # the write of step 10 may not have ended
    audit = read_audit(tmp_path)
    assert audit.is_exactly_once(50, 3)
    assert audit.repeated_steps == list(range(resumed.step_resumed, 12))
    assert difference(tmp_path, JOB) == 0


@pytest.mark.slow
def test_a_checkpoint_is_preferred_to_the_older_memory_of_a_standby(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB, policy=CheckpointPolicy(every_steps=5)) as run:
        gate = run.gate(3)
        first, second = run.start("a", gate.act, Act(13, "die")), run.start("b")
        run.publish(first, second)
        gate.wait()
        run.publish(first, cause=Cause.RESCALE)
        gate.open()
        assert second.wait_for(GenerationLeft).step <= 5
        first.exit_code()
        run.publish(second, cause=Cause.LOSS)
        resumed = second.wait_for(StepsResumed).resumption
        second.wait_for(TrainingFinished)
    assert resumed.source == "checkpoint"
    assert resumed.step_resumed in (5, 10)
    assert read_audit(tmp_path).is_exactly_once(50, 3)
    assert difference(tmp_path, JOB) < 1e-12


@pytest.mark.case("C09")
@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_its_first_mismatch(tmp_path: Path) -> None:
    """C09."""
    with Sessions(tmp_path, JOB) as run:
        node = run.start("a")
        run.publish(node)
        node.wait_for(TrainingFinished)
    with Sessions(tmp_path, ToyJob(hidden=9), attempt=2) as run:
        node = run.start("b")
        run.publish(node)
        assert node.exit_code() == 1
        assert "RefusedInput: 0.weight has the shape (8, 4), not (9, 4)" in node.output()


@pytest.mark.slow
def test_a_finished_run_that_is_started_again_hands_over_its_model_and_trains_nothing(tmp_path: Path) -> None:
    for attempt in (1, 2):
        with Sessions(tmp_path, JOB, attempt=attempt) as run:
            node = run.start(f"node{attempt}")
            run.publish(node)
            assert node.wait_for(TrainingFinished).result.steps == STEPS
            assert node.exit_code() == 0
    assert len(read_metrics(tmp_path)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize(("resume", "step"), [("auto", STEPS), ("never", 0)])
def test_resume_decides_whether_an_earlier_attempt_counts(tmp_path: Path, resume: Any, step: int) -> None:
    with Sessions(tmp_path, JOB) as run:
        node = run.start("a")
        run.publish(node)
        node.wait_for(TrainingFinished)
    with Sessions(tmp_path, JOB, attempt=2, resume=resume) as run:
        node = run.start("b")
        run.publish(node)
        node.wait_for(TrainingFinished)
    (start,) = [line["from"] for line in read_lines(tmp_path, "b") if "from" in line]
    assert start == step


@pytest.mark.case("C04")
@pytest.mark.slow
def test_a_required_checkpoint_that_is_missing_is_refused(tmp_path: Path) -> None:
    """C04."""
    with Sessions(tmp_path, JOB, resume="require") as run:
        node = run.start("a")
        run.publish(node)
        assert node.exit_code() == 1
        assert "checkpoint.directory" in node.output()
        assert "resume: auto" in node.output()


@pytest.mark.slow
def test_an_error_of_the_trainee_ends_its_worker_and_frees_the_others(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        first, second = run.start("a"), run.start("b", Act(4, "raise"))
        run.publish(first, second)
        assert first.wait_for(GroupBroken).step == 4
        assert second.exit_code() == 1
        assert "ValueError: bad label in step 4" in second.output()


@pytest.mark.slow
def test_a_member_that_never_comes_is_not_waited_for_once_a_newer_generation_is_known(tmp_path: Path) -> None:
    with Sessions(tmp_path, JOB) as run:
        first, second = run.start("a"), run.start("b")
        second.signal(signal.SIGSTOP)
        run.publish(first, second)
        start = time.monotonic()
        run.publish(first, cause=Cause.LOSS)
        first.wait_for(StepsResumed)
        assert time.monotonic() - start < 0.5
        first.wait_for(TrainingFinished)


@pytest.mark.slow
def test_deterministic_training_is_bitwise_equal_through_changes_of_the_world(tmp_path: Path) -> None:
    job = ToyJob(deterministic=True)
    with Sessions(tmp_path, job) as run:
        gate = run.gate(6)
        first, second, third = run.start("a", gate.act), run.start("b", Act(14, "die")), run.start("c")
        run.publish(first)
        gate.wait()
        run.publish(first, second, third, cause=Cause.JOIN)
        gate.open()
        first.wait_for(GroupBroken)
        run.publish(first, third, cause=Cause.LOSS)
        first.wait_for(TrainingFinished)
    assert difference(tmp_path, job) == 0
    assert read_audit(tmp_path).is_exactly_once(50, 3)
    assert {line["world_size"] for line in read_metrics(tmp_path)} == {1, 2, 3}


@pytest.mark.slow
def test_a_worker_throttled_to_half_its_speed_finds_itself_within_fifty_steps_and_no_other_does(
    tmp_path: Path,
) -> None:
    begins = 20
    with Sessions(tmp_path, ToyJob(epochs=20)) as run:
        first = run.start("a", Act(0, "throttle", seconds=0.03))
        second = run.start(
            "b", Act(0, "throttle", seconds=0.03), Act(begins, "throttle", seconds=0.06 + 0.03)
        )
        run.publish(first, second)
        slow = second.wait_for(PaceChanged).slow
        first.stop(save=False)
        second.stop(save=False)
        assert (first.exit_code(), second.exit_code()) == (75, 75)
    assert (slow.node_id, slow.rank, slow.is_slow) == ("b", 1, True)
    assert begins < slow.step <= begins + 50
    assert slow.ratio >= 1.5
    assert not [message for message in first.heard if isinstance(message, PaceChanged)]
    assert "rank 1 on node b is slow: " in second.output()
