"""A clock that a test moves by hand."""

from __future__ import annotations

from collections.abc import Callable


class ManualClock:
    """Time that stands still until `advance`; a `Clock` in which waits cost nothing."""

    def __init__(self, monotonic: float = 0.0, wall: float = 1_800_000_000.0) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._listeners: list[Callable[[], None]] = []

    def monotonic(self) -> float:
        """Return the seconds so far."""
        return self._monotonic

    def wall(self) -> float:
        """Return the seconds since the epoch."""
        return self._wall

    def advance(self, seconds: float) -> None:
        """Move time on, then tell everyone who asked to be told."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._monotonic += seconds
        self._wall += seconds
        for listener in list(self._listeners):
            listener()

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every move."""
        self._listeners.append(listener)
