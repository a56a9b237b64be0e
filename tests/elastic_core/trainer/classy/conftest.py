from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import elastic_core.trainer.classy.datasets  # noqa: F401  # registers them
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.trainee import ClassyTrainee


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """As workers have it; sums depend on the number of threads."""
    torch.set_num_threads(1)


def small_config(**changes: Any) -> dict[str, Any]:
    """Return a config that trains in milliseconds: 74 digits, a model with BatchNorm."""
    data = {"name": "digits", "batchsize_per_replica": 16}
    return {
        "name": "classification_task",
        "num_epochs": 2,
        "loss": {"name": "CrossEntropyLoss"},
        "dataset": {
            "train": {**data, "split": "train", "use_shuffle": True, "num_samples": 74},
            "test": {**data, "split": "test", "use_shuffle": False, "num_samples": 50},
        },
        "meters": {"accuracy": {"topk": [1, 3]}},
        "model": {
            "name": "resnet",
            "num_blocks": [1],
            "init_planes": 4,
            "basic_layer": True,
            "small_input": True,
            "heads": [
                {
                    "name": "fully_connected",
                    "unique_id": "head",
                    "num_classes": 10,
                    "fork_block": "block0-0",
                    "in_plane": 4,
                }
            ],
        },
        "optimizer": {
            "name": "sgd",
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "param_schedulers": {"lr": {"name": "cosine", "start_value": 0.1, "end_value": 0.001}},
        },
        **changes,
    }


def make_trainee(config: dict[str, Any] | None = None, **options: Any) -> ClassyTrainee:
    """Return a trainee that is set up: global batch 32, 4 shards, so steps of 32, 32 and 10 samples."""
    recipe = Recipe(
        config=config or small_config(), **{"global_batch": 32, "shards": 4, "seed": 0, **options}
    )
    trainee = ClassyTrainee(recipe, cpus=1)
    trainee.set_up()
    return trainee


def snapshot(trainee: ClassyTrainee) -> dict[str, torch.Tensor]:
    """Return copies of everything that the training changes, by name."""
    state = trainee.state_dict()
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, values in state["optimizer"].items():
        tensors |= {f"optimizer.{name}.{key}": torch.as_tensor(value) for key, value in values.items()}
    tensors |= {f"average.{name}": tensor for name, tensor in state["average"].items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert one.keys() == other.keys()
    return max((one[name].double() - other[name].double()).abs().max().item() for name in one)


Steps = Callable[..., list[ClassyTrainee]]
