"""An exponential moving average of the weights: what Classy Vision's hook `ema_model_weights` does.

Updated from weights that are the same on every rank, it is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm


class WeightAverage:
    """Averages parameters, and BatchNorm's statistics if asked; evaluation and export use the averages."""

    def __init__(self, model: Any, *, decay: float, with_statistics: bool) -> None:
        self.decay = decay
        self._live = dict(model.named_parameters())
        if with_statistics:
            self._live |= {
                f"{place}.{name}": buffer
                for place, module in model.named_modules()
                if isinstance(module, _BatchNorm)
                for name, buffer in module.named_buffers()
                if buffer.is_floating_point()
            }
        self.averages = {name: tensor.detach().clone() for name, tensor in self._live.items()}

    def update(self) -> None:
        """Take in the weights of a finished step."""
        live = [tensor.detach() for tensor in self._live.values()]
        torch._foreach_lerp_(list(self.averages.values()), live, 1 - self.decay)

    def reset(self) -> None:
        """Start again from the weights as they are."""
        self.load({name: tensor.detach() for name, tensor in self._live.items()})

    def load(self, averages: Mapping[str, torch.Tensor]) -> None:
        """Take over averages that were saved."""
        for name, average in self.averages.items():
            average.copy_(averages[name])

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put the averages into the model for the time of the block."""
        kept = {name: tensor.detach().clone() for name, tensor in self._live.items()}
        try:
            self._write(self.averages)
            yield
        finally:
            self._write(kept)

    def _write(self, values: Mapping[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, tensor in self._live.items():
                tensor.copy_(values[name])
