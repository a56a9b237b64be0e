"""Ranks as threads of one process, whose collectives sum in memory.

Only one rank runs at a time: random generators belong to the process, and real ranks have one each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from elastic_core.trainer.classy.solo import sum_in_order

T = TypeVar("T")
DEADLINE_S = 60.0


class PeerLost(Exception):
    """The collective broke, as it does when a peer dies."""


class FakeWorld:
    """A generation of `size` ranks; the collective with number `breaks_at` fails on all of them."""

    def __init__(self, size: int, *, breaks_at: int = -1) -> None:
        self.size = size
        self._breaks_at = breaks_at
        self._turn = threading.Condition()
        self._given: dict[int, dict[int, object]] = {}

    def run(self, work: Callable[[FakeReducer], T]) -> list[T]:
        """Do the same work on every rank and return what each gave, by rank."""

        def alone(rank: int) -> T:
            with self._turn:
                return work(FakeReducer(self, rank))

        with ThreadPoolExecutor(self.size) as pool:
            return list(pool.map(alone, range(self.size)))

    def exchange(self, rank: int, number: int, value: object) -> list[object]:
        """Wait for all ranks' values of one collective and return them by rank."""
        given = self._given.setdefault(number, {})
        given[rank] = value
        self._turn.notify_all()
        if not self._turn.wait_for(lambda: len(given) == self.size, timeout=DEADLINE_S):
            raise TimeoutError(f"only ranks {sorted(given)} came to collective {number}")
        if number == self._breaks_at:
            raise PeerLost(f"collective {number}")
        return [given[other] for other in range(self.size)]


class FakeReducer:
    """One rank's view; obeys `elastic_core.trainer.trainee.Reducer`."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self._world = world
        self._number = 0
        self.rank = rank

    @property
    def world_size(self) -> int:
        return self._world.size

    def reduce(self, flat: torch.Tensor) -> torch.Tensor:
        parts = self._exchange(flat.clone())
        return sum_in_order(dict(enumerate(parts)), len(parts))

    def reduce_shards(self, shards: Mapping[int, torch.Tensor], total: int) -> torch.Tensor:
        everything: dict[int, torch.Tensor] = {}
        for part in self._exchange(dict(shards)):
            assert not everything.keys() & part.keys(), "a shard was computed twice"
            everything |= part
        assert len(everything) == total
        return sum_in_order(everything, total)

    def _exchange(self, value):
        self._number += 1
        return self._world.exchange(self.rank, self._number - 1, value)
