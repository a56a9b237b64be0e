"""The state of a Classy trainee: nested dicts of tensors, numbers and strings, by parameter name.

Loading checks everything before it changes anything, and a refusal names the first mismatch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Final

import torch

from elastic_core.errors import RefusedInput

if TYPE_CHECKING:
    from elastic_core.trainer.classy.trainee import ClassyTrainee

FORMAT: Final = 1

_REMEDY: Final = "put it back, or start a new run with resume: never"

_FACTS: Final = {
    "global_batch": "training.elastic.global_batch",
    "virtual_shards": "training.elastic.virtual_shards",
    "samples": "number of training samples",
    "seed": "training.elastic.seed",
}


def save_state(trainee: ClassyTrainee) -> dict[str, Any]:
    """Return the state; its tensors are the live ones, not copies."""
    return {
        "format": FORMAT,
        "facts": _facts(trainee),
        "config": trainee.recipe.digests(),
        "step": trainee.step,
        "epoch": trainee.epoch,
        "evaluated": trainee.evaluated,
        "figures": dict(trainee.figures),
        "model": _tensors(trainee),
        "optimizer": _optimizer_state(trainee),
        "groups": _groups(trainee),
        "average": dict(trainee.average.averages) if trainee.average is not None else {},
    }


def load_state(trainee: ClassyTrainee, state: Mapping[str, Any]) -> int:
    """Take over a state and return its step.

    Raises:
        RefusedInput: It does not belong to this trainee, which is as before.
    """
    problem = next(_mismatches(trainee, state), None)
    if problem is not None:
        raise RefusedInput([f"checkpoint of step {state.get('step', '?')}: {problem}"])
    with torch.no_grad():
        for name, tensor in _tensors(trainee).items():
            tensor.copy_(state["model"][name])
    _load_optimizer(trainee, state)
    if trainee.average is not None:
        trainee.average.load(state["average"])
    trainee.evaluated = int(state["evaluated"])
    trainee.figures = dict(state["figures"])
    return int(state["step"])


def _facts(trainee: ClassyTrainee) -> dict[str, int]:
    return {
        "global_batch": trainee.recipe.global_batch,
        "virtual_shards": trainee.recipe.shards,
        "samples": trainee.schedule.samples,
        "seed": trainee.recipe.seed,
    }


def _tensors(trainee: ClassyTrainee) -> dict[str, torch.Tensor]:
    """Return every parameter and buffer, the frozen ones too."""
    task = trainee.task
    model = dict(task.base_model.named_parameters()) | dict(task.base_model.named_buffers())
    loss = dict(task.base_loss.named_parameters()) | dict(task.base_loss.named_buffers())
    return {name: tensor.detach() for name, tensor in model.items()} | {
        f"loss.{name}": tensor.detach() for name, tensor in loss.items()
    }


def _optimizer_state(trainee: ClassyTrainee) -> dict[str, dict[str, Any]]:
    state = trainee.task.optimizer.optimizer.state
    named = {name: state.get(parameter) for name, parameter in trainee.parameters().items()}
    return {
        name: {key: value for key, value in values.items() if value is not None}
        for name, values in named.items()
        if values
    }


def _groups(trainee: ClassyTrainee) -> list[dict[str, Any]]:
    """Return the numbers of each parameter group (learning rate, momentum…)."""
    groups = trainee.task.optimizer.optimizer.param_groups
    return [
        {key: value for key, value in group.items() if type(value) in (bool, int, float)} for group in groups
    ]


def _load_optimizer(trainee: ClassyTrainee, state: Mapping[str, Any]) -> None:
    optimizer = trainee.task.optimizer.optimizer
    optimizer.state.clear()
    for name, parameter in trainee.parameters().items():
        values = state["optimizer"].get(name)
        if values:
            optimizer.state[parameter] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value
                for key, value in values.items()
            }
    for group, saved in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(saved)


def _mismatches(trainee: ClassyTrainee, state: Mapping[str, Any]) -> Iterator[str]:
    """Yield what does not fit, the most telling first: facts, tensors, then sections of the config."""
    if state.get("format") != FORMAT:
        yield f"its format is {state.get('format')!r}; this version reads {FORMAT}"
        return
    for key, value in _facts(trainee).items():
        if state["facts"][key] != value:
            yield (
                f"{_FACTS[key]} was {state['facts'][key]} and is {value} now, but it decides which samples "
                f"come next: {_REMEDY}"
            )
    yield from _tensor_mismatches(_tensors(trainee), state["model"])
    for section, digest in trainee.recipe.digests().items():
        if state["config"].get(section) != digest:
            yield (
                f"section {section!r} of the Classy Vision config has changed since it was written: {_REMEDY}"
            )
    if (trainee.average is not None) != bool(state["average"]):
        yield f"hook 'ema_model_weights' was added or removed: {_REMEDY}"


def _tensor_mismatches(mine: Mapping[str, torch.Tensor], saved: Mapping[str, torch.Tensor]) -> Iterator[str]:
    remedy = f"the model's config has changed; {_REMEDY}"
    for name, tensor in sorted(
        mine.items(), key=lambda item: item[0].startswith("_heads.")
    ):  # the trunk first
        if name not in saved:
            yield f"tensor {name!r} is missing (shape {tuple(tensor.shape)} in the config's model): {remedy}"
        elif saved[name].shape != tensor.shape:
            yield (
                f"tensor {name!r} has shape {tuple(saved[name].shape)}, and {tuple(tensor.shape)} in the "
                f"config's model: {remedy}"
            )
    for name in saved:
        if name not in mine:
            shape = tuple(saved[name].shape)
            yield f"tensor {name!r} (shape {shape}) has no place in the config's model: {remedy}"
