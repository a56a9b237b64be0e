"""Beginning a training with the weights of a trained model."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.export import WEIGHTS

_LOG: Final = logging.getLogger(__name__)


def begin_with(model: Any, directory: Path) -> None:
    """Give a model the weights of an exported one.

    Where only the number of outputs differs (a class came or went), that layer begins anew.

    Raises:
        RefusedInput: The directory holds no weights, or those of another model.
    """
    try:
        weights = torch.load(directory / WEIGHTS, weights_only=True, map_location="cpu")
    except (OSError, RuntimeError, ValueError) as error:
        raise RefusedInput([f"training.warm_start: {str(directory)!r} holds no weights: {error}"]) from error
    own = model.state_dict()
    anew = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    strange = [
        *sorted(own.keys() ^ weights.keys()),
        *(name for name in anew if not _fits(own, weights, name)),
    ]
    if strange:
        raise RefusedInput(
            [
                f"training.warm_start: {str(directory)!r} holds another model ({', '.join(strange[:3])} "
                "differ): use the config that it was trained with, or begin anew without warm_start"
            ]
        )
    model.load_state_dict({**weights, **{name: own[name] for name in anew}})
    if anew:
        _LOG.warning("begin anew, because the number of outputs changed: %s", ", ".join(anew))


def _fits(own: dict[str, torch.Tensor], weights: dict[str, torch.Tensor], name: str) -> bool:
    """Return whether two tensors differ in the number of outputs alone."""
    return own[name].shape[1:] == weights[name].shape[1:]
