"""Weights from a file, whoever wrote it: Classy Vision, torchvision, timm, or this product's export.

Only tensors and plain values are read (`weights_only`), so a file cannot run code.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from elastic_core.errors import RefusedInput

_WRAPPERS: Final = ("state_dict", "model_state_dict", "model")
"""Keys under which training scripts of the field keep a model's weights."""

_CHECKPOINT: Final = "checkpoint.torch"
"""What Classy Vision calls the file in a directory of checkpoints."""

_ADAPTER: Final = "model."
"""Prefix of a foreign model's parameters within Classy Vision's adapter."""

_HEADS: Final = "_heads."


def read_weights(path: object, *, key: str) -> dict[str, Any]:
    """Return what a file of weights holds.

    Args:
        path: Path of the file.
        key: Where the path is in the config, for messages.

    Raises:
        RefusedInput: There is no such file, or it does not hold weights alone.
    """
    if isinstance(path, str) and Path(path).is_dir():
        path = str(Path(path) / _CHECKPOINT)
    if not isinstance(path, str) or not Path(path).is_file():
        raise RefusedInput(
            [f"{key}: {path!r} is no file; write one by torch.save(model.state_dict(), …), give its path"]
        )
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # the unpickler of torch raises anything over a file of nonsense
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise RefusedInput(
            [f"{key}: {path!r} does not hold weights alone ({first}); save model.state_dict() only"]
        ) from error
    if not isinstance(data, dict):
        raise RefusedInput([f"{key}: {path!r} holds a {type(data).__name__}; save model.state_dict()"])
    return data


def load_partly(model: Any, data: Mapping[str, Any], *, fresh: Sequence[str]) -> None:
    """Take over all weights of a state dict; modules named in `fresh` may be absent or of another shape.

    Raises:
        RefusedInput: A tensor beside those does not fit; the first one is named.
    """
    mine = model.state_dict()
    given = _names_as_in(mine, _state_of(data))
    problem = next(_misfits(mine, given, tuple(fresh)), None)
    if problem is not None:
        raise RefusedInput([f"weights: {problem}"])
    fitting = {
        name: tensor for name, tensor in given.items() if name in mine and tensor.shape == mine[name].shape
    }
    model.load_state_dict(fitting, strict=False)


def as_classy_state(
    model: Any, data: Mapping[str, Any], *, reset_heads: bool, strict: bool = True
) -> dict[str, Any]:
    """Return a checkpoint's weights in the form that Classy Vision's fine-tuning takes them.

    A checkpoint of Classy Vision passes; a plain state dict is brought into its form.

    Raises:
        RefusedInput: A tensor does not fit the model; the first one is named.
    """
    if "classy_state_dict" in data:
        if strict:
            _check_classy_state(model, data, reset_heads=reset_heads)
        return dict(data)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    heads = tuple(f"{_HEADS}{block}" for block in model.get_heads())
    classifier = getattr(model, "classifier", "")
    fresh = (*heads, classifier) if reset_heads else ()
    stated = {
        name: tensor
        for name, tensor in _names_as_in(before, _state_of(data)).items()
        if not _is_within(name, fresh)
    }
    load_partly(model, stated, fresh=fresh)
    state = model.get_classy_state(deep_copy=True)
    model.load_state_dict(before)
    return {"classy_state_dict": {"base_model": state}}


def _check_classy_state(model: Any, data: Mapping[str, Any], *, reset_heads: bool) -> None:
    """Refuse a checkpoint that does not fit: Classy Vision itself only says that it was unsuccessful."""
    mine = model.get_classy_state()["model"]
    try:
        given = data["classy_state_dict"]["base_model"]["model"]
        parts = [(mine["trunk"], given["trunk"])]
        parts += [] if reset_heads else [(_flat_heads(mine["heads"]), _flat_heads(given["heads"]))]
    except (KeyError, TypeError, AttributeError) as error:
        raise RefusedInput([f"weights: the checkpoint lacks {error} of a model"]) from error
    for one, other in parts:
        problem = next(_misfits(one, other, ()), None)
        if problem is not None:
            raise RefusedInput([f"weights: {problem}"])


def _flat_heads(heads: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    return {
        f"{block}.{head}.{name}": tensor
        for block, of_block in heads.items()
        for head, state in of_block.items()
        for name, tensor in state.items()
    }


def _state_of(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    for key in _WRAPPERS:
        if isinstance(data.get(key), Mapping):
            return _state_of(data[key])
    return {name: value for name, value in data.items() if isinstance(value, torch.Tensor)}


def _names_as_in(mine: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with the adapter's prefix, if it is that what makes its names another model's."""
    if given.keys() & mine.keys():
        return dict(given)
    return {f"{_ADAPTER}{name.removeprefix('module.')}": tensor for name, tensor in given.items()}


def _misfits(mine: Mapping[str, Any], given: Mapping[str, Any], fresh: tuple[str, ...]) -> Iterator[str]:
    for name, tensor in mine.items():
        if _is_within(name, fresh):
            continue
        if name not in given:
            yield f"tensor {name!r} of the model is not in the file: are they of another model?"
        elif given[name].shape != tensor.shape:
            yield (
                f"tensor {name!r} has shape {tuple(given[name].shape)} in the file and "
                f"{tuple(tensor.shape)} in the model"
            )
    for name in given:
        if name not in mine and not _is_within(name, fresh):
            yield f"tensor {name!r} of the file has no place in the model"


def _is_within(name: str, modules: tuple[str, ...]) -> bool:
    return any(module and name.startswith(f"{module}.") for module in modules)
