"""The spot market: capacity and price of each pool of (type, zone, market)."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from tasks.providers.aws.fleet import Market as Purchase
from tasks.providers.aws.fleet import Pool

DEFAULT_PRICES = {"spot": 0.35, "on-demand": 1.0}
"""US dollars an hour of a pool whose price was not set."""


@dataclass(slots=True)
class SpotMarket:
    """Capacity and prices; unlimited until `limit` says otherwise.

    Attributes:
        price: Dollars an hour by pool.
    """

    price: dict[Pool, float] = field(default_factory=dict)
    _capacity: dict[Pool, int] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def limit(self, pool: Pool, nodes: int) -> None:
        """Let a pool have so many nodes more."""
        with self._lock:
            self._capacity[pool] = nodes

    def price_of(self, pool: Pool) -> float:
        """Return dollars an hour."""
        return self.price.get(pool, DEFAULT_PRICES[pool.market])

    def take(
        self, types: Sequence[str], zone: str, purchase: Purchase, count: int
    ) -> tuple[list[str], list[Pool]]:
        """Take up to `count` nodes from the best pools.

        Returns:
            The type of each node, and the pools that had too little. Spot goes to the cheapest pool
            that has capacity, as price-capacity-optimized does where pools are equally deep.
        """
        pools = [Pool(kind, zone, purchase) for kind in types]
        if purchase == "spot":
            pools.sort(key=self.price_of)
        taken: list[str] = []
        exhausted: list[Pool] = []
        with self._lock:
            for pool in pools:
                missing = count - len(taken)
                left = self._capacity.get(pool, missing)
                got = min(missing, left)
                taken += [pool.instance_type] * got
                if pool in self._capacity:
                    self._capacity[pool] = left - got
                if got < missing:
                    exhausted.append(pool)
        return taken, exhausted

    def reset(self) -> None:
        """Forget all limits and prices."""
        with self._lock:
            self._capacity.clear()
            self.price.clear()
