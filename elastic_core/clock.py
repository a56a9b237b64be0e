"""Time as an argument: the one module of the library that reads a clock."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of time that tests can move by hand."""

    def monotonic(self) -> float:
        """Return seconds that never go back; only differences on one machine have a meaning."""
        ...

    def wall(self) -> float:
        """Return seconds since the epoch: for reports, never for a decision between machines."""
        ...


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()

    def wall(self) -> float:
        """Return `time.time()`."""
        return time.time()
