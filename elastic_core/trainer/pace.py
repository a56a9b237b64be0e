"""Whether a worker is slower than those of other nodes, by what its own work takes: a pure fold over steps.

All wait for the slowest, so a step takes everywhere the same and tells nothing. What is compared is
the time that a worker computed and read data, without that in a collective. Every rank learns all of
them with the step's own reduction, and judges itself.

It is compared with those that were dealt as many samples. Where there are none it is slow only if it is
so by the step and by the sample: one that was dealt more takes longer for a step, one that was dealt
less pays its fixed cost for fewer samples, and neither is ill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Final

WINDOW: Final = 40
"""Looks that a verdict needs: a pause, however long, is one of them and decides nothing."""
SLOW: Final = 1.5
"""Times as long as the others, over the middle looks: a fifth of them may be anything."""
RECOVERED: Final = 1.25
"""A slow worker that comes below is one no more."""
LEAST_S: Final = 0.0125
"""Shorter steps are put together to a look of so long: below it the scheduler is what is measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the last step was for one worker.

    Attributes:
        seconds: Of its own work; 0: it has not finished a step yet.
        samples: It trained in it.
        node: Its node's number in the generation.
    """

    seconds: float = 0.0
    samples: float = 0.0
    node: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """A verdict.

    Attributes:
        ratio: Times as long as the others.
        seconds: Of this worker's own work a step.
        others: The same of the middle one of the others.
        looks: How many it was judged by.
    """

    is_slow: bool
    ratio: float
    seconds: float
    others: float
    looks: int = WINDOW


@dataclass(slots=True)
class PaceDetector:
    """Judges the worker that it belongs to; each change of the verdict is told once."""

    is_slow: bool = False
    _looks: deque[Pace] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _gathered: list[Load] = field(default_factory=list)
    _steps: int = 0

    def look(self, loads: Sequence[Load], rank: int) -> Pace | None:
        """Take in what the last step was for all ranks; return the verdict if it changed."""
        if any(load.seconds <= 0 or load.samples <= 0 for load in loads):
            return None
        if [load.node for load in loads] == [load.node for load in self._gathered]:
            self._gathered = list(map(_sum, self._gathered, loads))
            self._steps += 1
        else:
            self._gathered, self._steps = list(loads), 1
        if max(load.seconds for load in self._gathered) < LEAST_S:
            return None
        look = _compare(self._gathered, rank, self._steps)
        self._gathered = []
        if look is None:
            return None
        self._looks.append(look)
        return self._judge() if len(self._looks) == WINDOW else None

    def _judge(self) -> Pace | None:
        ratio = _middle([look.ratio for look in self._looks])
        is_slow = ratio >= (RECOVERED if self.is_slow else SLOW)
        if is_slow == self.is_slow:
            return None
        self.is_slow = is_slow
        return Pace(
            is_slow=is_slow,
            ratio=ratio,
            seconds=median(look.seconds for look in self._looks),
            others=median(look.others for look in self._looks),
        )


def _middle(ratios: Sequence[float]) -> float:
    """Return the geometric mean without the lowest and the highest fifth: steadier than the median."""
    cut = len(ratios) // 5
    return geometric_mean(sorted(ratios)[cut : len(ratios) - cut])


def _sum(one: Load, other: Load) -> Load:
    return Load(one.seconds + other.seconds, one.samples + other.samples, one.node)


def _compare(loads: Sequence[Load], rank: int, steps: int) -> Pace | None:
    """Return one look; None: there is no other node."""
    own = loads[rank]
    others = [load for load in loads if load.node != own.node]
    if not others:
        return None
    alike = [load.seconds for load in others if load.samples == own.samples]
    by_step = median(alike or [load.seconds for load in others])
    ratio = own.seconds / by_step
    if not alike:
        by_sample = median(load.seconds / load.samples for load in others)
        ratio = min(ratio, own.seconds / own.samples / by_sample)
    return Pace(is_slow=False, ratio=ratio, seconds=own.seconds / steps, others=by_step / steps, looks=1)
