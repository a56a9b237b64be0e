"""Precise BatchNorm: statistics measured with the weights as they are, not averaged over older ones.

Measured over the first shards of the epoch, each on one rank, and summed in the order of
the shards: the same statistics, to the bit, at every world size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from elastic_core.trainer.trainee import Reducer

Shards = Iterable[tuple[int, Any]]
"""Numbers of shards with their samples, None for a shard that could not be read."""


class PreciseStatistics:
    """Measures mean and variance of every BatchNorm layer in training mode."""

    def __init__(self, model: Any, forward: Callable[[Any], Any]) -> None:
        self._model = model
        self._forward = forward

    def measure(self, shards: Shards, numbers: Iterable[int], reducer: Reducer, total: int) -> None:
        """Set the statistics to their mean over the samples of all ranks' shards.

        Args:
            shards: This rank's, of any number of steps.
            numbers: The shards of a step that are this rank's.
            reducer: Sums over the ranks.
            total: Shards of a step, over all ranks.

        Raises:
            trainer.group.GroupBroken: A peer has gone; the statistics are as before.
        """
        layers = [
            module
            for module in self._model.modules()
            if isinstance(module, _BatchNorm) and module.training and module.track_running_stats
        ]
        if not layers:
            return
        statistics = [
            _there(tensor) for layer in layers for tensor in (layer.running_mean, layer.running_var)
        ]
        buffers, momenta = list(self._model.buffers()), [layer.momentum for layer in layers]
        kept = [buffer.clone() for buffer in buffers]
        try:
            for layer in layers:
                layer.momentum = 1.0  # what a forward pass leaves is what it measured
            sums = self._sums(shards, numbers, statistics)
        finally:
            for layer, momentum in zip(layers, momenta, strict=True):
                layer.momentum = momentum
            _write(buffers, kept)
        sizes = [tensor.numel() for tensor in statistics]
        *parts, samples = torch.split(reducer.reduce_shards(sums, total), [*sizes, 1])
        if samples.item() > 0:
            means = [part.view_as(tensor) / samples for part, tensor in zip(parts, statistics, strict=True)]
            _write(statistics, means)

    def _sums(
        self, shards: Shards, numbers: Iterable[int], statistics: list[torch.Tensor]
    ) -> Mapping[int, torch.Tensor]:
        size = sum(map(torch.numel, statistics)) + 1
        sums = {number: statistics[0].new_zeros(size) for number in numbers}
        with torch.no_grad():
            for number, sample in shards:
                if sample is not None:
                    count = len(self._forward(sample))
                    ones = statistics[0].new_ones(1)
                    sums[number] += torch.cat([*(tensor.flatten() for tensor in statistics), ones]) * count
        return sums


def _there(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None, "a layer that tracks statistics has them"
    return tensor


def _write(tensors: Iterable[torch.Tensor], values: Iterable[torch.Tensor]) -> None:
    with torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            tensor.copy_(value)
