"""A world of one, without an agent: the reference that every disturbed run is compared with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elastic_core.trainer.trainee import StepReport, Trainee


class SoloReducer:
    """The collectives of a single rank. Shards are added in the order of their numbers, as always."""

    rank = 0
    world_size = 1

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the tensor: there is nobody else."""
        return flat

    def reduce_shards(self, shards: Mapping[int, torch.Tensor], total: int) -> torch.Tensor:
        """Sum the shards in the order of their numbers."""
        return sum_in_order(shards, total)


def sum_in_order(shards: Mapping[int, torch.Tensor], total: int) -> torch.Tensor:
    """Return shard 0 + shard 1 + …: floating-point sums depend on the order, so there is one order."""
    result = shards[0].clone()
    for number in range(1, total):
        result += shards[number]
    return result


def train_alone(trainee: Trainee, run_dir: Path) -> Mapping[str, float]:
    """Train from the first to the last step, write one line a step and the model; return the results."""
    reducer = SoloReducer()
    run_dir.mkdir(parents=True, exist_ok=True)
    trainee.set_up()
    with (run_dir / "metrics.jsonl").open("w") as stream:
        while trainee.step < trainee.total_steps:
            stream.write(_line(trainee.train_step(reducer)))
            if trainee.evaluation_due():
                trainee.evaluate(reducer)
    trainee.export(run_dir / "model")
    return trainee.results()


def _line(report: StepReport) -> str:
    line: dict[str, Any] = {"step": report.step, "epoch": report.epoch, "samples": report.samples}
    return json.dumps({**line, **report.metrics}) + "\n"
