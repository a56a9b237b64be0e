"""Notices that a cloud will take this machine away: what they mean, and when to leave. Pure.

The texts are those of EC2's metadata service. A notice is best effort: it may come
late, or never, so nothing depends on it; it only makes leaving free.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import Final, Literal
from urllib.parse import urlsplit

from elastic_core.errors import RefusedInput

MARGIN_S: Final = 2.0
"""A node is out this long before its machine goes."""


class NoticeKind(StrEnum):
    """What was announced."""

    INTERRUPTION = "spot interruption"
    """The machine goes at a known time."""
    REBALANCE = "rebalance recommendation"
    """It probably goes soon; nobody says when."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice:
    """One announcement.

    Attributes:
        text: The announcement as people and the node's record read it.
        seconds_left: Until the machine goes, by the clock of whoever announced it; None if nobody says.
    """

    kind: NoticeKind
    text: str
    seconds_left: float | None = None

    def wait_s(self, leave_before: float) -> float:
        """Return how long to train on: until `leave_before` seconds are left; 0: not at all."""
        if self.seconds_left is None or leave_before <= 0:
            return 0.0
        return max(0.0, self.seconds_left - leave_before)

    def out_within_s(self) -> float | None:
        """Return the seconds within which the node must be out, None without a known end."""
        return None if self.seconds_left is None else max(0.0, self.seconds_left - MARGIN_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoticeSource:
    """Where notices come from.

    Attributes:
        endpoint: Address of the metadata service.
        leave_before: Seconds before the announced end at which the node begins to leave; 0: at once.
        period: Seconds between two looks.
    """

    endpoint: str
    leave_before: float = 0.0
    period: float = 2.0


def read_interruption(body: str, now: datetime) -> Notice:
    """Return what `spot/instance-action` says.

    An answer that cannot be read still says that the machine goes: then nobody knows when.

    Args:
        body: `{"action": "terminate", "time": "2026-01-31T12:02:00Z"}`.
        now: The time by the clock that announced it, so that this node's own may be wrong.
    """
    try:
        told = json.loads(body)
        action, at = str(told["action"]), datetime.fromisoformat(str(told["time"]).replace("Z", "+00:00"))
        seconds = (at - now).total_seconds()
    except (ValueError, KeyError, TypeError):
        return Notice(kind=NoticeKind.INTERRUPTION, text=str(NoticeKind.INTERRUPTION))
    text = f"{NoticeKind.INTERRUPTION}: {action} at {at:%H:%M:%S} UTC"
    return Notice(kind=NoticeKind.INTERRUPTION, text=text, seconds_left=max(0.0, seconds))


def read_rebalance() -> Notice:
    """Return what an answer of `events/recommendations/rebalance` says: that there is one is all of it."""
    return Notice(kind=NoticeKind.REBALANCE, text=str(NoticeKind.REBALANCE))


def notice_source(kind: str, endpoint: str, leave_before: str) -> NoticeSource | None:
    """Return the source that the command line names.

    Raises:
        RefusedInput: All mistakes.
    """
    problems = []
    allowed: tuple[Literal["none", "imds"], ...] = ("none", "imds")
    if kind not in allowed:
        problems.append(f"--notices {kind!r}: must be {' or '.join(allowed)}")
    address = urlsplit(endpoint)
    if address.scheme != "http" or not address.hostname:
        problems.append(f"--notices-endpoint {endpoint!r}: give an address like http://169.254.169.254")
    seconds = _seconds(leave_before)
    if seconds is None:
        problems.append(f"--leave-before {leave_before!r}: must be seconds, 0 (at once) or more")
    if problems:
        raise RefusedInput(problems)
    return NoticeSource(endpoint=endpoint, leave_before=seconds or 0.0) if kind == "imds" else None


def _seconds(text: str) -> float | None:
    try:
        seconds = float(text)
    except ValueError:
        return None
    return seconds if 0 <= seconds <= 1e6 else None
