from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.trainee import ClassyTrainee
from tests.elastic_core.trainer.classy.conftest import (
    largest_difference,
    make_trainee,
    small_config,
    snapshot,
)
from tests.elastic_core.trainer.classy.fake_world import FakeWorld

ALONE = SoloReducer()


def watched(run_dir: Path, *hooks: dict[str, Any]) -> ClassyTrainee:
    config = small_config(hooks=list(hooks))
    trainee = ClassyTrainee(Recipe(config=config, global_batch=32, shards=4, seed=0), run_dir=run_dir)
    trainee.set_up()
    return trainee


def curves_of(run_dir: Path) -> dict[str, list[int]]:
    """Return the steps of each curve as TensorBoard reads them."""
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = reader.EventAccumulator(str(run_dir / "tensorboard"))
    events.Reload()
    return {tag: [event.step for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


# tensorboard's own readers use what numpy and protobuf deprecate
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_curves_have_each_step_once_over_restarts_and_redone_steps(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    first = watched(tmp_path, {"name": "tensorboard_plot"})
    first.train_step(ALONE)
    first.train_step(ALONE)
    saved = first.state_dict()
    first.train_step(ALONE)  # this step is lost with its process
    first.evaluate(ALONE)

    second = watched(tmp_path, {"name": "tensorboard_plot"})
    second.load_state_dict(saved)
    for _ in range(2):
        second.train_step(ALONE)
    second.evaluate(ALONE)

    curves = curves_of(tmp_path)
    assert {tag: steps for tag, steps in curves.items() if tag.startswith("train/")} == {
        "train/loss": [0, 1, 2, 3],
        "train/accuracy": [0, 1, 2, 3],
        "train/lr": [0, 1, 2, 3],
    }
    assert curves["test/accuracy"] == [3]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_only_the_process_that_is_rank_zero_writes_curves(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    ranks = [watched(tmp_path, {"name": "tensorboard_plot", "log_period": 2}) for _ in range(2)]

    def work(reducer: Any) -> None:
        for _ in range(3):
            ranks[reducer.rank].train_step(reducer)
        ranks[reducer.rank].evaluate(reducer)

    FakeWorld(2).run(work)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1
    assert curves_of(tmp_path)["train/loss"] == [0, 2]


def test_a_missing_tensorboard_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(RefusedInput) as refusal:
        watched(tmp_path, {"name": "tensorboard_plot"})
    assert refusal.value.problems == (
        "hooks: tensorboard_plot needs TensorBoard where this runs: pip install tensorboard",
    )


def test_a_profile_of_the_named_steps_is_written_and_changes_nothing(tmp_path: Path) -> None:
    trainee, plain = watched(tmp_path, {"name": "profiler", "first_step": 1, "steps": 2}), make_trainee()
    for one in (trainee, plain):
        for _ in range(4):
            one.train_step(ALONE)
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "steps-1-2.json"
    events = json.loads(trace.read_text())["traceEvents"]
    spans = Counter(event["name"] for event in events if event["ph"] == "X")
    assert spans["aten::cross_entropy_loss"] == 8, "two steps of four shards"
    assert largest_difference(snapshot(trainee), snapshot(plain)) == 0


# ---- precise statistics ----------------------------------------------------------------------


def precise_config(samples: int) -> dict[str, Any]:
    return small_config(hooks=[{"name": "precise_bn", "num_samples": samples}])


def measured(size: int, samples: int) -> list[ClassyTrainee]:
    ranks = [make_trainee(precise_config(samples), deterministic=True) for _ in range(size)]

    def work(reducer: Any) -> None:
        for _ in range(3):
            ranks[reducer.rank].train_step(reducer)
        ranks[reducer.rank].evaluate(reducer)

    FakeWorld(size).run(work)
    return ranks


@pytest.mark.parametrize("samples", [32, 74])
def test_precise_statistics_are_equal_to_the_bit_at_any_world_size(samples: int) -> None:
    (alone,) = measured(1, samples)
    for rank in measured(3, samples):
        assert largest_difference(snapshot(rank), snapshot(alone)) == 0


def test_precise_statistics_are_those_of_the_weights_as_they_are() -> None:
    (trainee,) = measured(1, 32)
    weights = {name: tensor.clone() for name, tensor in snapshot(trainee).items()}
    model = trainee.task.base_model
    norm = next(module for module in model.modules() if isinstance(module, torch.nn.BatchNorm2d))
    seen: list[torch.Tensor] = []
    handle = norm.register_forward_hook(lambda _, inputs, output: seen.append(inputs[0].detach()))
    trainee.task.enter_evaluation()
    data = trainee.task.datasets["train"]
    for ids in trainee._shards(0, ALONE).values():
        trainee.task.compute_model({"input": torch.stack([data[index]["input"] for index in ids])})
    handle.remove()
    means = torch.stack([shard.mean((0, 2, 3)) for shard in seen]).mean(0)
    assert torch.allclose(norm.running_mean, means, atol=1e-5)
    assert largest_difference(snapshot(trainee), weights) == 0
    counts = [buffer.item() for name, buffer in trainee.buffers().items() if name.endswith("tracked")]
    assert set(counts) == {3}


def test_an_evaluation_run_again_measures_the_same_statistics() -> None:
    (trainee,) = measured(1, 32)
    before = snapshot(trainee)
    trainee.evaluate(ALONE)
    assert largest_difference(snapshot(trainee), before) == 0
