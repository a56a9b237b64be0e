"""A rehearsal: a config's first step, last shard, evaluation and state, on a few samples.

It finds what only shows in training: shapes, labels, losses and states that do not fit.
"""

from __future__ import annotations

import copy
import io
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.utils.flop_counter import FlopCounterMode

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.evaluation import is_summable
from elastic_core.trainer.classy.inspection import word
from elastic_core.trainer.classy.problems import ROOT, at
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.schedule import Schedule
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.trainee import ClassyTrainee

_SAMPLES: Final = 2
"""Enough to find what does not fit, few enough for a large model on one core."""

_PATIENCE_S: Final = 8.0
"""A model whose outputs took longer than this is not rehearsed further: a step takes three times as long."""


@dataclass(slots=True)
class Rehearsal:
    """What a short training showed.

    Attributes:
        problems: What goes wrong.
        flops: Floating-point operations of one forward pass over one sample.
    """

    problems: list[str] = field(default_factory=list)
    flops: float = 0


def rehearse(recipe: Recipe, schedule: Schedule) -> Rehearsal:
    """Train a recipe whose parts can all be built a little, and say what that shows."""
    shown = Rehearsal()
    smallest = smallest_shard(schedule, recipe.shards)
    sizes = {min(recipe.global_batch // recipe.shards, _SAMPLES), min(smallest, _SAMPLES)}
    for size in sorted(sizes, reverse=True):
        try:
            shown.problems += _rehearse(recipe, size, shown)
        except RefusedInput as refusal:
            shown.problems += refusal.problems
        except Exception as error:  # any failure here would be one in training
            shown.problems.append(
                f"{ROOT}: training a shard of {size} samples fails: {word(error)}{_remedy(error, size)}"
            )
        if shown.problems:
            break
    return shown


def smallest_shard(schedule: Schedule, shards: int) -> int:
    """Return the samples of the smallest shard that is not empty: BatchNorm refuses some of one sample."""
    last = schedule.samples % schedule.global_batch or min(schedule.global_batch, schedule.samples)
    return max(1, last // shards)


def _rehearse(recipe: Recipe, size: int, shown: Rehearsal) -> Iterator[str]:
    trainee = ClassyTrainee(
        replace(recipe, config=_small(recipe.config), global_batch=size, shards=1), cpus=1
    )
    trainee.prepare()
    start = time.monotonic()
    unfit = list(_misfits(trainee, recipe.config, shown))
    yield from unfit
    if unfit or time.monotonic() - start > _PATIENCE_S:
        return
    trainee.run_dry()
    if recipe.config["dataset"].get("test") is not None:
        trainee.evaluate(SoloReducer())
    yield from _state_problems(trainee)


def _small(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with few held-out samples and without loader processes."""
    small = copy.deepcopy(dict(config))
    for phase, section in small["dataset"].items():
        if section is not None:
            section["num_workers"] = 0
            if phase == "test":
                section["num_samples"] = min(_SAMPLES, section.get("num_samples") or _SAMPLES)
    return small


def _misfits(trainee: ClassyTrainee, config: Mapping[str, Any], shown: Rehearsal) -> Iterator[str]:
    """Compare one batch with what the model makes of it."""
    sample = trainee.first_batch()
    if sample is None:
        yield f"{at(ROOT, 'dataset', 'train')}: none of its first samples can be read"
        return
    if not isinstance(sample, Mapping) or not {"input", "target"} <= sample.keys():
        yield (
            f"{at(ROOT, 'dataset', 'train')}: its samples are not dicts with 'input' and 'target': use the "
            "transform tuple_to_map or generic_image_transform"
        )
        return
    trainee.task.enter_evaluation()
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        output = trainee.task.compute_model(sample)
    shown.flops = counter.get_total_flops() / len(sample["target"])
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        shape = tuple(output.shape) if isinstance(output, torch.Tensor) else type(output).__name__
        yield (
            f"{at(ROOT, 'model', 'heads')}: the model's output has shape {shape}, not (samples, classes): "
            'give it one head, like {"name": "fully_connected", …}'
        )
        return
    yield from _label_problems(trainee, sample["target"], output.shape[1])
    yield from _meter_problems(trainee, config, output.shape[1])


def _label_problems(trainee: ClassyTrainee, target: torch.Tensor, outputs: int) -> Iterator[str]:
    if target.is_floating_point() or target.ndim != 1:
        return
    highest = max(int(target.max()), _highest_label(trainee))
    if highest >= outputs:
        yield (
            f"{at(ROOT, 'model')}: it has {outputs} outputs and there are labels up to {highest}: "
            f"set num_classes to at least {highest + 1}"
        )


def _meter_problems(trainee: ClassyTrainee, config: Mapping[str, Any], outputs: int) -> Iterator[str]:
    for name, meter in config["meters"].items():
        topk = max(meter.get("topk") or [1]) if isinstance(meter, Mapping) else 1
        if topk > outputs:
            place = at(ROOT, "meters", name, "topk")
            yield f"{place}: asks for the best {topk} of {outputs} classes: use at most {outputs}"
    for meter in trainee.task.meters:
        if not is_summable(meter):
            yield (
                f"{at(ROOT, 'meters', meter.name)}: its counts cannot be summed over ranks; its state needs "
                'tensors under keys that start with "curr", as the accuracy meter has'
            )


def _highest_label(trainee: ClassyTrainee) -> int:
    """Return the highest label that the data set knows of without reading it."""
    classes = getattr(trainee.task.datasets["train"], "classes", ())
    return len(classes) - 1


def _state_problems(trainee: ClassyTrainee) -> Iterator[str]:
    """Write and read the state as a checkpoint does."""
    stream = io.BytesIO()
    torch.save(trainee.state_dict(), stream)
    stream.seek(0)
    try:
        trainee.load_state_dict(torch.load(stream, weights_only=True))
    except Exception as error:  # unpickling may raise anything
        yield f"{ROOT}: the training's state could not be read back from a checkpoint: {word(error)}"


def _remedy(error: Exception, size: int) -> str:
    text = str(error)
    if "more than 1 value per channel" in text:
        return (
            f"; BatchNorm cannot train {size} sample alone: change training.elastic.global_batch or "
            "virtual_shards so that each shard of an epoch's last batch has more"
        )
    if "shapes cannot be multiplied" in text or "size mismatch" in text:
        return "; a head's in_plane must be the channels of the block that it is attached to"
    return ""
