"""Which samples come next for this worker, at any world size and from any step on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from elastic_core.errors import RefusedInput
from elastic_core.trainer.order import epoch_order, steps_per_epoch


class Cursor(Protocol):
    """Where a training is, and who asks."""

    @property
    def step(self) -> int:
        """Finished steps."""
        ...

    @property
    def rank(self) -> int:
        """This worker's rank."""
        ...

    @property
    def world_size(self) -> int:
        """Workers in this generation."""
        ...

    def expect(self, total: int) -> None:
        """Hear how many steps the whole training has."""
        ...

    def begin_step(self, step: int, epoch: int, ids: Sequence[int]) -> None:
        """Hear that this worker was given the samples of a step."""
        ...


class ElasticSampler:
    """A batch sampler: yields this rank's part of each global batch of an epoch that is still to be trained.

    An epoch of N samples has ceil(N / global_batch) steps, whose sizes differ by one sample at
    most, so that no rank is ever left without a sample. Order and steps depend on seed and epoch
    only, and rank r of W takes every W-th sample of a batch from r on.
    """

    def __init__(
        self, cursor: Cursor, samples: int, *, global_batch: int, seed: int = 0, shuffle: bool = True
    ) -> None:
        """Prepare the sampler.

        Raises:
            RefusedInput: There are no samples, or a batch is too small for the workers there are.
        """
        if samples < 1 or global_batch < 1:
            raise RefusedInput(
                [f"elastic.sampler: {samples} samples in batches of {global_batch}: both must be 1 or more"]
            )
        self.samples = samples
        self.global_batch = global_batch
        self.seed = seed
        self.steps_per_epoch = steps_per_epoch(samples, global_batch)
        self._cursor = cursor
        self._shuffle = shuffle
        self._epoch: int | None = None
        smallest = samples // self.steps_per_epoch
        if smallest < cursor.world_size:
            raise RefusedInput(
                [
                    f"global_batch: {global_batch} of {samples} samples make a batch of {smallest}, too few "
                    f"for {cursor.world_size} workers: raise global_batch, or let fewer nodes train"
                ]
            )

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch of the next iteration, as with torch's `DistributedSampler`.

        Of an epoch that was trained before a restart nothing is left to yield.

        Raises:
            RuntimeError: Steps of earlier epochs were not reported by `elastic.step()`.
        """
        if self._epoch is not None:
            self._check_reported(epoch * self.steps_per_epoch)
        self._epoch = epoch

    def epochs(self, count: int) -> Iterator[int]:
        """Yield the epochs from the one that training is in, each chosen for the next iteration.

        Raises:
            RuntimeError: An epoch's steps were not reported by `elastic.step()`.
        """
        self._cursor.expect(count * self.steps_per_epoch)
        for epoch in range(self.epoch_of(self._cursor.step), count):
            self.set_epoch(epoch)
            yield epoch
            self._check_reported((epoch + 1) * self.steps_per_epoch)

    def epoch_of(self, step: int) -> int:
        """Return the epoch that a step belongs to."""
        return step // self.steps_per_epoch

    def size_of(self, step: int) -> int:
        """Return the samples of a step over all ranks."""
        return len(self._positions(step))

    def weight(self) -> float:
        """Return by what a loss averaged over this rank's part is to be multiplied in the next step.

        1 where a batch divides evenly. DistributedDataParallel averages over ranks; so weighted, its
        average is that over samples, whatever the world size.
        """
        size, world = self.size_of(self._cursor.step), self._cursor.world_size
        own = len(range(self._cursor.rank, size, world))
        return own * world / size

    def __len__(self) -> int:
        """Return the batches that the next iteration yields."""
        return max(0, self._end() - self._cursor.step)

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the ids of this rank, batch after batch, from the next step to the end of the epoch."""
        epoch, end = self._chosen(), self._end()
        order: Sequence[int] = range(self.samples)
        if self._shuffle:
            order = epoch_order(self.samples, self.seed, epoch)
        for step in range(max(self._cursor.step, epoch * self.steps_per_epoch), end):
            positions = self._positions(step)
            ids = [order[place] for place in positions[self._cursor.rank :: self._cursor.world_size]]
            self._cursor.begin_step(step, epoch, ids)
            yield ids

    def _check_reported(self, due: int) -> None:
        if self._cursor.step < due:
            raise RuntimeError(
                f"{due} steps should have been trained by now, and elastic.step() was called for "
                f"{self._cursor.step}: call it once after every optimizer.step()"
            )

    def _chosen(self) -> int:
        return self.epoch_of(self._cursor.step) if self._epoch is None else self._epoch

    def _end(self) -> int:
        return (self._chosen() + 1) * self.steps_per_epoch

    def _positions(self, step: int) -> range:
        """Return the places in the epoch's order that a step owns."""
        number, steps = step % self.steps_per_epoch, self.steps_per_epoch
        return range(number * self.samples // steps, (number + 1) * self.samples // steps)
