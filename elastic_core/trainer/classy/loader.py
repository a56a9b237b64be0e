"""Fetching samples by id, each under its own seed, in this process or ahead of time in others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from torch.utils.data import DataLoader, Dataset, default_collate

from elastic_core.trainer.classy.compat import ClassyDataset
from elastic_core.trainer.classy.seeds import derive, random_state_kept, seed_all


class Request(NamedTuple):
    """A few samples wanted as one batch, with what their augmentation depends on."""

    purpose: str
    epoch: int
    ids: tuple[int, ...]


class _SeededSamples(Dataset[Any]):
    """The dataset as loader workers see it: they are asked for (purpose, epoch, id)."""

    def __init__(self, dataset: ClassyDataset, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed

    def __getitem__(self, key: tuple[str, int, int]) -> Any:
        purpose, epoch, index = key
        seed_all(derive(self._seed, purpose, epoch, index))
        return self._dataset[index]

    def __getitems__(self, keys: Sequence[tuple[str, int, int]]) -> list[Any]:
        with random_state_kept():
            return [self[key] for key in keys]


def _collate(samples: list[Any]) -> Any:
    """Return a batch of the samples that could be read, None if none could."""
    there = [sample for sample in samples if sample is not None]
    return default_collate(there) if there else None


class _Keys:
    """A batch sampler that can be pointed at other requests: ranks change, worker processes stay."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[list[tuple[str, int, int]]]:
        for request in self.requests:
            yield [(request.purpose, request.epoch, index) for index in request.ids]


class SampleLoader:
    """Gives batches by request, and fetches ahead what is likely to be asked next.

    With worker processes, batches are fetched in the order that `upcoming` tells. A request out
    of that order (the world changed) drops what was fetched and starts anew; the processes stay.
    """

    def __init__(self, dataset: ClassyDataset, *, seed: int, workers: int) -> None:
        self._samples = _SeededSamples(dataset, seed)
        self._keys = _Keys()
        self._ahead: Iterator[Request] = iter(())
        self._batches: Iterator[Any] = iter(())
        self._loader: DataLoader[Any] | None = None
        if workers:
            self._loader = DataLoader(
                self._samples,
                batch_sampler=self._keys,
                collate_fn=_collate,
                num_workers=workers,
                multiprocessing_context="fork",  # spawn costs 5 CPU seconds a worker
                persistent_workers=True,
            )

    def fetch(self, request: Request, upcoming: Callable[[], Iterable[Request]]) -> Any:
        """Return the batch of a request, without the samples that the data set leaves out (None: all).

        `upcoming` is called if the request was not foreseen: it gives the requests from this one on.
        """
        if self._loader is None:
            keys = [(request.purpose, request.epoch, index) for index in request.ids]
            return _collate(self._samples.__getitems__(keys))
        if next(self._ahead, None) != request:
            self._keys.requests = requests = list(upcoming())
            self._ahead = iter(requests)
            self._batches = iter(self._loader)
            next(self._ahead)
        return next(self._batches)
