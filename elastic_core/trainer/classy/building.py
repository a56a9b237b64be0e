"""The expensive half of the validation: Classy Vision is imported, the config built and rehearsed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.trainer.classy.datasets import register_user_package
from elastic_core.trainer.classy.inspection import inspect
from elastic_core.trainer.classy.problems import ROOT, at
from elastic_core.trainer.classy.recipe import Recipe, resolve
from elastic_core.trainer.classy.rehearsal import rehearse
from elastic_core.trainer.classy.schedule import Schedule
from elastic_core.trainer.classy.validate import Verdict


def judge_built(job: JobSpec, base: Path) -> Verdict:
    """Judge a job whose config reads well; relative paths start from `base`."""
    assert isinstance(job.training, ClassyTraining)
    torch.set_num_threads(1)
    try:
        register_user_package(job.training.user_package)
    except RefusedInput as refusal:
        return Verdict(refusal.problems)
    recipe = resolve(job, base)
    parts = inspect(recipe.config)
    if parts.problems:
        return Verdict(tuple(parts.problems))
    data: dict[str, Any] = {phase: parts.built.get(at(ROOT, "dataset", phase)) for phase in ("train", "test")}
    problems = _size_problems(data, recipe)
    if problems:
        return Verdict(tuple(problems))
    schedule = Schedule(
        samples=len(data["train"]),
        global_batch=recipe.global_batch,
        epochs=recipe.config["num_epochs"],
        test_period=0,
    )
    shown = rehearse(recipe, schedule)
    if shown.problems:
        return Verdict(tuple(shown.problems))
    model = parts.built[at(ROOT, "model")]
    return Verdict((), _summary(recipe, schedule, _complexity(model, shown.flops), data["test"]))


def _size_problems(data: Mapping[str, Any], recipe: Recipe) -> list[str]:
    found = []
    for phase, dataset in data.items():
        if dataset is None:
            continue
        place = at(ROOT, "dataset", phase)
        try:
            samples = len(dataset)
        except (AssertionError, TypeError) as error:
            found.append(f"{at(place, 'num_samples')}: {error}")
            continue
        if samples == 0:
            found.append(f"{place}: has no samples")
        elif phase == "train" and samples < recipe.global_batch:
            found.append(
                f"training.elastic.global_batch: is {recipe.global_batch}, more than the {samples} "
                f"samples of {place}: lower it"
            )
    return found


def _complexity(model: Any, flops: float) -> str:
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return f"{parameters:,} parameters and {flops / 1e6:,.1f} MFLOP a sample"


def _summary(recipe: Recipe, schedule: Schedule, complexity: str, test: Any) -> str:
    held_out = f"{len(test):,} held-out samples" if test is not None else "no evaluation"
    return (
        f"model {recipe.config['model']['name']} with {complexity}, "
        f"{schedule.samples:,} training and {held_out}, "
        f"{schedule.total_steps:,} steps in {schedule.epochs} epochs, "
        f"global batch {recipe.global_batch} in {recipe.shards} shards, learning rate {_rate(recipe.config)}"
    )


def _rate(config: Mapping[str, Any]) -> str:
    optimizer = config["optimizer"]
    rates = [
        rate for rate in _numbers((optimizer.get("param_schedulers") or {}).get("lr")) if math.isfinite(rate)
    ]
    if rates:
        return f"{max(rates):g} at most"
    return f"{optimizer['lr']:g}" if "lr" in optimizer else "of the optimizer's default"


def _numbers(schedule: Any) -> list[float]:
    """Return the learning rates that a schedule names."""
    if not isinstance(schedule, Mapping):
        return []
    found = [schedule[key] for key in ("start_value", "end_value", "value", "base_lr") if key in schedule]
    found += schedule.get("values") or []
    return found + [rate for inner in schedule.get("schedulers") or [] for rate in _numbers(inner)]
