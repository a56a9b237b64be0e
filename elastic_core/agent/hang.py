"""When a worker counts as hung: it does not come to the collective, or stands still by a signal. Pure.

A worker that waits for its peers is never hung, however long it waits: the one that they wait
for is. Time counts only while it was being watched, so that an agent that was frozen
together with its workers accuses nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from elastic_core.pulse import Beat, Doing

FLOOR: Final = 30.0
"""No derived limit is shorter: a busy machine is not a hung one."""
FACTOR: Final = 20.0
"""A step may take so many times the longest one before."""
UNKNOWN: Final = 300.0
"""For the first step of a process: it may compile, and its loaders start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hang:
    """A worker that hangs.

    Attributes:
        seconds: For how long it was watched without a change.
        is_stopped: It stands still because of a signal.
    """

    seconds: float
    step: int
    is_stopped: bool


class HangDetector:
    """Judges one worker, look after look; each hang is told once."""

    def __init__(self, *, declared: float, period: float) -> None:
        """Begin.

        Args:
            declared: The limit in seconds, 0 to derive it from the steps so far.
            period: Between two looks; a longer gap is a pause of the watcher itself.
        """
        self._declared = declared
        self._longest_gap = 2 * period
        self._beat = Beat()
        self._was_stopped = False
        self._seen_at: float | None = None
        self._unchanged = 0.0
        self._is_told = False

    def look(self, beat: Beat, *, is_stopped: bool, now: float) -> Hang | None:
        """Take in a look, and return the hang if there is one that was not told."""
        gap = 0.0 if self._seen_at is None else min(now - self._seen_at, self._longest_gap)
        self._seen_at = now
        if beat != self._beat or is_stopped != self._was_stopped:
            self._beat, self._was_stopped = beat, is_stopped
            self._unchanged, self._is_told = 0.0, False
            return None
        self._unchanged += gap
        is_awaited = is_stopped or beat.doing is Doing.WORKING
        if self._is_told or not is_awaited or self._unchanged < self.limit(beat, is_stopped=is_stopped):
            return None
        self._is_told = True
        return Hang(seconds=self._unchanged, step=beat.step, is_stopped=is_stopped)

    def limit(self, beat: Beat, *, is_stopped: bool) -> float:
        """Return for how long a worker may go without a change."""
        if self._declared:
            return self._declared
        if is_stopped:
            return FLOOR
        return max(FLOOR, FACTOR * beat.longest) if beat.done else UNKNOWN
