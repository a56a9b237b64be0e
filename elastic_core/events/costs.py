"""What a run's machines cost: prices as they were at each launch, times the hours that they ran. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

HOUR_S: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineCost:
    """One machine and its price.

    Attributes:
        market: "spot" or "on-demand".
        usd_per_hour: The price when it was launched.
        launched_at: In wall-clock seconds.
        ended_at: Likewise; None while it runs.
    """

    machine: str
    kind: str
    market: str
    usd_per_hour: float
    launched_at: float
    ended_at: float | None = None

    def hours(self, now: float) -> float:
        """Return how long it has run."""
        ended = now if self.ended_at is None else self.ended_at
        return max(ended - self.launched_at, 0.0) / HOUR_S

    def usd(self, now: float) -> float:
        """Return what it has cost."""
        return self.usd_per_hour * self.hours(now)

    def projected(self, now: float, max_hours: float) -> float:
        """Return what it will cost if it runs as long as it may."""
        if self.ended_at is not None:
            return self.usd(now)
        return self.usd_per_hour * max(max_hours, self.hours(now))


def fold_costs(lines: Iterable[Mapping[str, Any]]) -> tuple[MachineCost, ...]:
    """Return the machines that a run's record tells of; a line of another form is passed over."""
    machines: dict[str, MachineCost] = {}
    for line in lines:
        name = str(line.get("machine", ""))
        try:
            if "usd_per_hour" in line:
                machines.setdefault(name, MachineCost(**line))
            elif name in machines and machines[name].ended_at is None:
                machines[name] = replace(machines[name], ended_at=float(line["ended_at"]))
        except (TypeError, KeyError, ValueError):
            continue
    return tuple(machines.values())


def total_usd(machines: Iterable[MachineCost], now: float) -> float:
    """Return what machines have cost."""
    return sum(machine.usd(now) for machine in machines)


def affordable(
    machines: Iterable[MachineCost], *, budget: float, price: float, max_hours: float, now: float
) -> int:
    """Return how many machines more stay within the budget even if all run as long as they may."""
    left = budget - sum(machine.projected(now, max_hours) for machine in machines)
    return max(int(left / (price * max_hours) + 1e-9), 0)
