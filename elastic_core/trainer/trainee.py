"""What the elastic loop trains, and what it offers to it.

The loop (`trainer.loop`) owns generations, boundaries, checkpoints and the
audit; a trainee owns model, data and optimizer. After every step all ranks hold
bitwise the same state, so that any survivor can hand it to the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One finished optimizer step, with figures over the whole global batch.

    Attributes:
        step: Index of the step, job-wide from 0.
        epoch: Epoch it belongs to, from 0.
        samples: Samples in its global batch.
        metrics: loss, lr, accuracy…, the same on every rank.
    """

    step: int
    epoch: int
    samples: int
    metrics: Mapping[str, float]


class Reducer(Protocol):
    """The collectives of one generation, as a trainee sees them.

    Every call may raise `trainer.group.GroupBroken`; a trainee lets it pass and has not changed
    its state by then.
    """

    @property
    def rank(self) -> int:
        """This worker's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Workers in this generation."""
        ...

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        """Sum a one-dimensional tensor over all ranks; the same length on each.

        The sum may be returned in the memory of `flat` itself. Carries this rank's wish to leave
        along, so that all ranks learn of it at the same step.
        """
        ...

    def reduce_shards(self, shards: Mapping[int, torch.Tensor], total: int) -> torch.Tensor:
        """Sum per-shard tensors in the order of their numbers, bitwise the same at any world size.

        Args:
            shards: Exactly the shards `order.shards_of(rank, world_size, total)`, empty ones as zeros.
            total: Shards over all ranks.
        """
        ...


class Trainee(Protocol):
    """A training that can be carried from one generation to the next."""

    @property
    def step(self) -> int:
        """Finished optimizer steps, job-wide."""
        ...

    @property
    def total_steps(self) -> int:
        """Steps of the whole job."""
        ...

    @property
    def epoch(self) -> int:
        """Epoch of the next step, from 0."""
        ...

    def set_up(self) -> None:
        """Build model, data and optimizer, and warm every kernel by a dry step that changes no state."""
        ...

    def sample_ids(self, reducer: Reducer) -> Sequence[int]:
        """Return the ids that this rank trains in the next step, for the audit."""
        ...

    def train_step(self, reducer: Reducer) -> StepReport:
        """Do one optimizer step: compute, reduce once, update. No change of state if the reduction fails."""
        ...

    def evaluation_due(self) -> bool:
        """Return whether the finished step ends an epoch that is to be evaluated and has not been yet."""
        ...

    def evaluate(self, reducer: Reducer) -> Mapping[str, float]:
        """Evaluate each held-out sample once over all ranks; may be run again after a broken group."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state (no copies): nested dicts, lists, tensors, numbers and strings only."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            elastic_core.errors.RefusedInput: It belongs to another model or configuration; the message
                names the first mismatch.
        """
        ...

    def export(self, directory: Path) -> str:
        """Write the trained model with what is needed to rebuild it; return its path."""
        ...

    def results(self) -> Mapping[str, float]:
        """Return the final figures, `test_accuracy` among them for classifiers."""
        ...
