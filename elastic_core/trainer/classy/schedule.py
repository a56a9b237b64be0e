"""Where a step is: pure arithmetic from the step's number to its epoch and its place in training."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_core.trainer import order


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The steps of a whole training; the world size is not among what they depend on.

    Attributes:
        samples: Training samples an epoch.
        global_batch: Samples a step; the last step of an epoch may have fewer.
        test_period: Evaluate after so many epochs; 0: never.
    """

    samples: int
    global_batch: int
    epochs: int
    test_period: int

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch: nothing is dropped and nothing is padded."""
        return order.steps_per_epoch(self.samples, self.global_batch)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps_per_epoch * self.epochs

    def epoch_of(self, step: int) -> int:
        """Return the epoch of a step, from 0."""
        return step // self.steps_per_epoch

    def batch_of(self, step: int) -> int:
        """Return the step's number within its epoch, from 0."""
        return step % self.steps_per_epoch

    def where(self, step: int) -> float:
        """Return the part of training done before a step, in [0, 1): what the schedules are functions of."""
        return step / self.total_steps

    def evaluates_at(self, finished: int) -> bool:
        """Return whether `finished` steps end an epoch after which the held-out samples are evaluated."""
        if not self.test_period or finished == 0 or finished % self.steps_per_epoch:
            return False
        epochs = finished // self.steps_per_epoch
        return epochs % self.test_period == 0 or epochs == self.epochs
