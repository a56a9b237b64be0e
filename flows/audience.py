"""Who listens to a flow in its own process: the command line's live progress, and tests.

A flow's parameters are data, so a listener comes by context, not by argument.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from elastic_core.ids import RunId
from elastic_core.model.membership import Outcome
from tasks.agents import Attempt
from tasks.watch import Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSnapshot:
    """A run at one moment.

    Attributes:
        began_at: When this flow began, wall-clock seconds.
    """

    attempt: Attempt
    began_at: float
    observation: Observation


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnd:
    """How a run's attempt ended, for people and exit statuses."""

    run: RunId
    outcome: Outcome
    exit_code: int
    reason: str
    report: Path


class Audience(Protocol):
    """Is told what happens, in the flow's main thread; must return at once and never raise."""

    def decided(self, sentence: str) -> None:
        """Hear what was decided and why."""
        ...

    def saw(self, snapshot: RunSnapshot) -> None:
        """See the run after a change, and about once a second."""
        ...

    def ended(self, end: RunEnd) -> None:
        """Learn how it ended; everything of the run is over by then."""
        ...


class Nobody:
    """The audience of a flow on a server."""

    def decided(self, sentence: str) -> None:
        """Do nothing."""

    def saw(self, snapshot: RunSnapshot) -> None:
        """Do nothing."""

    def ended(self, end: RunEnd) -> None:
        """Do nothing."""


_NOBODY: Final = Nobody()
_audience: ContextVar[Audience] = ContextVar("audience")


def audience() -> Audience:
    """Return who listens now."""
    return _audience.get(_NOBODY)


@contextmanager
def listening(listener: Audience) -> Iterator[None]:
    """Let `listener` hear the flows that run within."""
    token = _audience.set(listener)
    try:
        yield
    finally:
        _audience.reset(token)
