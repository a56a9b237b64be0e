"""What a run spends: the price of each machine, noted at its launch, and the budget that a launch must keep.

The record lies with the run's other records, so that a flow which adopts the run
knows what was spent before, also on machines that EC2 does not show any more.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_core.errors import QuotaExceeded
from elastic_core.events.costs import MachineCost, affordable
from elastic_core.ids import RunId
from elastic_core.model.job import AwsPool
from tasks.providers.aws.faults import naming
from tasks.providers.aws.fleet import Market
from tasks.runs import COSTS_FILE, read_costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Spending:
    """The spending of runs.

    Attributes:
        runs: Directory of all runs' directories.
        clock: Wall-clock seconds.
    """

    pool: AwsPool
    ec2: Any
    runs: Path
    clock: Callable[[], float]

    def prices(self, kinds: Sequence[str], zone: str, market: Market) -> dict[str, float]:
        """Return dollars an hour by type, where they are known."""
        if market == "on-demand":
            return {kind: self.pool.on_demand_usd[kind] for kind in kinds if kind in self.pool.on_demand_usd}
        with naming("DescribeSpotPriceHistory"):
            answer = self.ec2.describe_spot_price_history(
                InstanceTypes=list(kinds),
                Filters=[{"Name": "availability-zone", "Values": [zone]}],
                ProductDescriptions=["Linux/UNIX"],
                StartTime=self.clock(),
            )
        newest = sorted(answer["SpotPriceHistory"], key=lambda price: price["Timestamp"])
        return {price["InstanceType"]: float(price["SpotPrice"]) for price in newest}

    def allow(self, run: RunId, count: int, prices: Mapping[str, float]) -> int:
        """Return how many of `count` machines the budget allows, at the highest of the prices.

        Raises:
            QuotaExceeded: Not a single one.
        """
        budget = self.pool.budget_usd
        if not budget:
            return count
        if not prices:
            raise QuotaExceeded("pool.budget_usd is set and no price is known: add pool.on_demand_usd")
        price = max(prices.values())
        machines = self.machines(run)
        allowed = affordable(
            machines, budget=budget, price=price, max_hours=self.pool.max_hours, now=self.clock()
        )
        if not allowed:
            planned = sum(machine.projected(self.clock(), self.pool.max_hours) for machine in machines)
            raise QuotaExceeded(
                f"pool.budget_usd: another machine at ${price:.3f} an hour for up to "
                f"{self.pool.max_hours:g} h would bring the run from ${planned:.2f} beyond ${budget:.2f}: "
                "raise it, or lower pool.max_hours"
            )
        return min(count, allowed)

    def note_launch(
        self, run: RunId, machines: Mapping[str, str], market: Market, prices: Mapping[str, float]
    ) -> None:
        """Note machines, by name and type, at the prices of now; unknown prices are not made up."""
        now = self.clock()
        self._append(
            run,
            [
                {
                    "machine": name,
                    "kind": kind,
                    "market": market,
                    "usd_per_hour": prices[kind],
                    "launched_at": now,
                }
                for name, kind in machines.items()
                if kind in prices
            ],
        )

    def note_ends(self, run: RunId, names: Iterable[str]) -> None:
        """Note that machines ended, by now at the latest; those that were noted are passed over."""
        running = {machine.machine for machine in self.machines(run) if machine.ended_at is None}
        now = self.clock()
        self._append(run, [{"machine": name, "ended_at": now} for name in names if name in running])

    def machines(self, run: RunId) -> tuple[MachineCost, ...]:
        """Return all machines of a run that were noted."""
        return read_costs(self.runs / run)

    def _append(self, run: RunId, lines: Sequence[Mapping[str, Any]]) -> None:
        if not lines:
            return
        path = self.runs / run / COSTS_FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
