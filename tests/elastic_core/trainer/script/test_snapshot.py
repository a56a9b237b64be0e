"""A plain loop without an agent: alone, as ranks of plain torchrun, stopped and started again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.elastic_core.trainer.script.loop import STEPS, Loop, assert_same_weights


@pytest.fixture
def loop(tmp_path: Path) -> Loop:
    return Loop(tmp_path)


@pytest.mark.case("G04")
@pytest.mark.parametrize("loaders", [0, 2])
def test_a_signal_to_the_whole_process_group_saves_the_current_step(
    loop: Loop, undisturbed: dict[str, torch.Tensor], loaders: int
) -> None:
    hold = loop.hold(10)
    process = loop.start(f"--loaders={loaders}")
    loop.wait_committed(9)
    assert process.pid is not None
    os.killpg(process.pid, signal.SIGTERM)
    hold.unlink()
    assert loop.finish(process) == [-signal.SIGTERM], loop.log.read_text()
    assert loop.finish(loop.start()) == [0], loop.log.read_text()
    audit = loop.audit()
    assert (audit.is_exact, audit.steps, audit.steps_lost) == (True, STEPS, 0)
    assert "source=checkpoint" in loop.log.read_text()
    assert_same_weights(loop.directory, undisturbed)


def test_ranks_of_plain_torchrun_go_on_from_the_checkpoint_at_another_world_size(
    loop: Loop, undisturbed: dict[str, torch.Tensor]
) -> None:
    hold = loop.hold(9)
    ranks = loop.ranks(2)
    loop.wait_committed(8)
    ranks[1].kill()
    hold.unlink()
    assert loop.finish(*ranks) == [1, -signal.SIGKILL], loop.log.read_text()
    assert loop.finish(loop.start()) == [0], loop.log.read_text()
    audit = loop.audit()
    assert (audit.is_exact, audit.steps, audit.steps_lost) == (True, STEPS, 2), "7 steps were durable"
    assert_same_weights(loop.directory, undisturbed)


@pytest.mark.case("C07")
def test_a_finished_training_started_again_ends_well_and_trains_nothing(loop: Loop) -> None:
    assert loop.finish(loop.start()) == [0]
    lines = loop.run_dir / "metrics.jsonl"
    before = lines.read_text()
    assert loop.finish(loop.start()) == [0]
    assert lines.read_text() == before
    assert "already complete, nothing to train" in loop.log.read_text()


@pytest.mark.case("C09")
def test_a_changed_model_is_refused_before_it_trains(loop: Loop) -> None:
    assert loop.finish(loop.start("--epochs=1")) == [0]
    assert loop.finish(loop.start("--hidden=9")) == [1]
    assert "model.0.weight: shape (8, 4) in the saved state → shape (9, 4) now" in loop.log.read_text()
