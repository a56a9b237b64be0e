"""The ledger of a whole run: its attempts one after the other, and the time between them.

Each attempt has a ledger of its own, which tiles it. Between two of them nobody was there
to train: that time is a class of its own, so that the whole sums up, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_core.events.ledger import Spent
from elastic_core.events.record import AttemptSpan

STOPPED: Final = "stopped"
"""The class of time between two attempts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeLedger:
    """Where the time of a run went, from its first start to its newest end."""

    spans: tuple[AttemptSpan, ...]
    wall_s: float
    seconds: Mapping[str, float]

    @property
    def goodput(self) -> float:
        """Share of the time of the attempts in which the model learned something new."""
        running = self.wall_s - self.seconds[STOPPED]
        return self.seconds[Spent.TRAIN] / running if running > 0 else 0.0


def fold_attempts(spans: Sequence[AttemptSpan]) -> WholeLedger:
    """Put the attempts of a run together.

    An attempt that seems to begin before the one before it ended (clocks are set) begins when it did.
    """
    ordered = sorted(spans, key=lambda span: span.attempt)
    seconds: dict[str, float] = dict.fromkeys([*Spent, STOPPED], 0.0)
    for before, span in zip([None, *ordered], ordered, strict=False):
        for spent, took in span.seconds.items():
            seconds[spent] = seconds.get(spent, 0.0) + took
        if before is not None:
            seconds[STOPPED] += max(0.0, span.started_at - before.ended_at)
    return WholeLedger(spans=tuple(ordered), wall_s=sum(seconds.values()), seconds=seconds)
