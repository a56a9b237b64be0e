"""Everything one step sums over the ranks, as one flat tensor.

It holds the gradients, what the shards did to the model's buffers (BatchNorm's running
statistics), and the step's figures, each weighted by the shard's part of the
global batch. One collective carries all of it, so a step happens on all ranks or on none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

FIGURES = ("loss", "correct", "samples")


class StepTensor:
    """Collects a step's shards and spreads the sum over the ranks to parameters and buffers.

    Buffers enter as changes from the step's start, so that constant ones stay exactly what they
    are, and each shard starts from the same ones, so that no rank's statistics differ from another's.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], buffers: Sequence[torch.Tensor]) -> None:
        self._parameters = list(parameters)
        self._buffers = [buffer for buffer in buffers if buffer.dtype != torch.bool]
        sizes = [tensor.numel() for tensor in (*self._parameters, *self._buffers)]
        self._sizes = [*sizes, len(FIGURES)]
        first = self._parameters[0]
        self._flat = torch.zeros(sum(self._sizes), dtype=first.dtype, device=first.device)
        self._initial = [buffer.clone() for buffer in self._buffers]

    def start(self) -> None:
        """Forget the last step; gradients of the coming backward passes add up in the flat tensor."""
        self._flat = torch.zeros_like(self._flat)
        for parameter, part in zip(self._parameters, torch.split(self._flat, self._sizes), strict=False):
            parameter.grad = part.view_as(parameter)
        for initial, buffer in zip(self._initial, self._buffers, strict=True):
            initial.copy_(buffer)

    def add_shard(self, *, weight: float, loss: float, correct: float, samples: int) -> None:
        """Take in what a shard's forward pass did beside its gradients, and undo it in the buffers."""
        changes = torch.split(self._flat, self._sizes)[len(self._parameters) : -1]
        for change, initial, buffer in zip(changes, self._initial, self._buffers, strict=True):
            change.add_((buffer - initial).flatten(), alpha=weight)
        self.restore_buffers()
        self._flat[-len(FIGURES) :] += torch.tensor(
            [weight * loss, correct, samples], dtype=self._flat.dtype, device=self._flat.device
        )

    def restore_buffers(self) -> None:
        """Put the buffers back to where the step started."""
        with torch.no_grad():
            for initial, buffer in zip(self._initial, self._buffers, strict=True):
                buffer.copy_(initial)

    @property
    def flat(self) -> torch.Tensor:
        """What was collected since `start`, as a tensor that nothing else will change afterwards."""
        return self._flat

    def take(self) -> torch.Tensor:
        """Return what was collected and start a new collection from the same buffers."""
        taken = self._flat
        self.start()
        return taken

    def apply(self, total: torch.Tensor, *, dealt: int) -> dict[str, float]:
        """Set gradients and buffers from the sum over all ranks, and return its figures.

        `dealt` is the size of the batch; where samples of it could not be read, the sum is
        brought to the mean over the others.
        """
        figures = dict(zip(FIGURES, total[-len(FIGURES) :].tolist(), strict=True))
        if figures["samples"] != dealt:
            total = total * (dealt / figures["samples"])
            figures["loss"] = float(total[-len(FIGURES)])
        *parts, _ = torch.split(total, self._sizes)
        for parameter, part in zip(self._parameters, parts, strict=False):
            parameter.grad = part.view_as(parameter)
        with torch.no_grad():
            for buffer, change in zip(self._buffers, parts[len(self._parameters) :], strict=True):
                change = change if buffer.is_floating_point() else change.round()
                buffer.add_(change.view_as(buffer).to(buffer.dtype))
        return figures
