"""When the next durable checkpoint is due: after fixed steps or seconds, or as cost and failures say."""

from __future__ import annotations

from math import sqrt
from typing import Final

from elastic_core.model.job import CheckpointPolicy

FIRST_S: Final = 10.0
"""Until the first checkpoint has shown what one costs."""

_LONGEST_S: Final = 600.0
_PART_WRITING: Final = 0.1
"""At most so much of the time is a checkpoint being written, for the disk has other work too."""

_EXPECTED_S: Final = 3600.0
"""Time between failures before any was seen; counts as one failure in so many seconds."""


def young_daly(cost_s: float, between_failures_s: float) -> float:
    """Return the seconds between checkpoints at which their cost and the work lost are least together.

    Daly's estimate of higher order; with Young's, sqrt(2 C M), as its first term.

    Args:
        cost_s: For how long one checkpoint holds training up.
        between_failures_s: Mean time from one loss of the state to the next.
    """
    if cost_s >= 2 * between_failures_s:
        return between_failures_s
    part = sqrt(cost_s / (2 * between_failures_s))
    return sqrt(2 * cost_s * between_failures_s) * (1 + part / 3 + part * part / 9) - cost_s


class CheckpointInterval:
    """Decides when a checkpoint is due, from what it is told; all times are of one monotonic clock."""

    def __init__(self, policy: CheckpointPolicy, *, now: float, failures: int = 0) -> None:
        """Begin to count.

        Args:
            policy: The job's.
            now: The training begins.
            failures: How often the state was lost before that, as far as is known.
        """
        self._policy = policy
        self._began_at = now
        self._saved_at = now
        self._failures = failures
        self._stall_s = 0.0
        self._write_s = 0.0

    def broke(self) -> None:
        """Learn that training broke: a loss or a failure, nothing planned."""
        self._failures += 1

    def cost(self, *, stall_s: float, write_s: float) -> None:
        """Learn how long the last checkpoint held training up, and how long it took to be written."""
        self._stall_s, self._write_s = stall_s, write_s

    def saved(self, now: float) -> None:
        """Begin the next interval."""
        self._saved_at = now

    def is_due(self, *, step: int, now: float) -> bool:
        """Tell whether a checkpoint of so many finished steps is to be written now."""
        if self._policy.every_steps:
            return step % self._policy.every_steps == 0
        return now - self._saved_at >= self.seconds(now)

    def seconds(self, now: float) -> float:
        """Return the seconds from one checkpoint to the next."""
        if self._policy.every_seconds:
            return self._policy.every_seconds
        if not self._write_s:
            return FIRST_S
        between = (_EXPECTED_S + now - self._began_at) / (1 + self._failures)
        best = young_daly(self._stall_s, between)
        return min(max(best, 1.0, self._write_s / _PART_WRITING), _LONGEST_S)
