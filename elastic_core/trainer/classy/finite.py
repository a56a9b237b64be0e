"""What happens when a loss or a gradient is no number any more: stop with the samples named, or pass over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Literal

import torch

_MOST_IN_A_ROW: Final = 10
"""So many steps passed over one after another mean that the model is lost, not that a batch was bad."""

_MOST_IDS: Final = 16


class FiniteGuard:
    """Looks at the sum over all ranks, so every rank decides the same."""

    def __init__(self, policy: Literal["stop", "skip"]) -> None:
        self._policy = policy
        self._bad: list[int] = []
        self.in_a_row = 0

    def start(self) -> None:
        """Begin a step."""
        self._bad = []

    def note(self, loss: float, ids: Sequence[int]) -> None:
        """Remember the samples of a shard of this rank whose loss is no number."""
        if not math.isfinite(loss):
            self._bad += ids

    def accepts(self, total: torch.Tensor, *, step: int, epoch: int) -> bool:
        """Return whether a step's sum is to be applied.

        Raises:
            FloatingPointError: It is no number, and the policy is to stop, or too many were passed over.
        """
        loss = total[-3].item()
        if math.isfinite(loss) and (self._policy == "stop" or bool(total.isfinite().all())):
            self.in_a_row = 0
            return True
        self.in_a_row += 1
        if self._policy == "skip" and self.in_a_row <= _MOST_IN_A_ROW:
            return False
        passed = f", after {_MOST_IN_A_ROW} steps passed over" if self._policy == "skip" else ""
        raise FloatingPointError(
            f"the loss is {loss} at step {step} (epoch {epoch}){passed}, from {self._where()}: lower the "
            "learning rate, warm it up, set clip_grad_norm, or look at the samples"
        )

    def _where(self) -> str:
        if not self._bad:
            return "shards of another rank, whose message names them"
        more = f" and {len(self._bad) - _MOST_IDS} more" if len(self._bad) > _MOST_IDS else ""
        return f"the shard of samples {', '.join(map(str, self._bad[:_MOST_IDS]))}{more}"
