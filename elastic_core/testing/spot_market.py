"""A spot market for a simulated run: it takes machines away together, and gives others later.

Real markets do not take one machine at a time: a pool that runs dry loses many in one moment.
So machines go in *reclaims* of a drawn size, most of them announced (the nodes drain), the rest
without a word (they are killed); for each that went another comes after a while. The same seed
gives the same market. A rate of 0.1 an hour, each machine lost once in ten hours, is what the public
traces of GPU spot machines show, some less and some five times as much.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from elastic_core.testing.simulator import Simulator


@dataclass(frozen=True, slots=True, kw_only=True)
class MarketRates:
    """What a market does.

    Attributes:
        losses_per_hour: Of one machine.
        reclaim: Machines that go together, in the mean.
        announced: Share of the reclaims that come with a notice.
        launch: Seconds until another machine registers in the place of one that went.
    """

    losses_per_hour: float = 0.1
    reclaim: float = 25.0
    announced: float = 0.8
    launch: float = 60.0


class SpotMarket:
    """Acts on one simulator.

    Attributes:
        lost: Machines that it took.
        reclaims: How often it took some.
    """

    def __init__(self, simulator: Simulator, seed: int, rates: MarketRates | None = None) -> None:
        self.lost = 0
        self.reclaims = 0
        self._simulator = simulator
        self._rates = rates or MarketRates()
        self._rng = random.Random(seed)

    def open(self, machines: int, seconds: float) -> None:
        """Let time pass with all that the market does to so many machines in it."""
        rates, simulator = self._rates, self._simulator
        reclaims_per_s = machines * rates.losses_per_hour / rates.reclaim / 3600.0
        end = simulator.now + seconds
        while (pause := self._rng.expovariate(reclaims_per_s)) < end - simulator.now:
            simulator.run(pause)
            self._reclaim()
        simulator.run(end - simulator.now)

    def _reclaim(self) -> None:
        simulator, rates = self._simulator, self._rates
        living = [node for node in simulator.store.nodes if not simulator.is_down(node)]
        size = 1 + int(self._rng.expovariate(1.0 / (rates.reclaim - 1.0)))
        take = simulator.drain if self._rng.random() < rates.announced else simulator.kill
        self.reclaims += 1
        for node in self._rng.sample(living, min(size, len(living) // 2)):
            take(node)
            self.lost += 1
            simulator.after(rates.launch, simulator.add_node)
