"""Tells Prefect what happens to a run, as events: each once, never more than a server likes to keep.

Prefect queues an event and sends it from a thread of its own, so telling costs the
watch loop nothing, also while the server is away.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Final

from prefect.events import emit_event

from elastic_core.events.costs import total_usd
from elastic_core.model.job import AwsPool
from flows.audience import RunSnapshot
from flows.news import News, news_between, news_of_costs
from tasks.runs import read_costs
from tasks.watch import Observation

WINDOW_S: Final = 60.0
MOST: Final = 60
"""Events of one name within the window."""
FEWER: Final = {"elastic.checkpoint.written": 2}
COSTS_PERIOD_S: Final = 10.0

Emit = Callable[[str, str, dict[str, Any]], None]
"""Takes the name of an event, the run and the payload; returns at once."""


class EventTeller:
    """Finds what is news in each look at a run, and tells it.

    Args:
        clock: Monotonic seconds.
        wall: Wall-clock seconds, in which costs are told.
    """

    def __init__(
        self,
        emit: Emit,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._emit = emit
        self._clock = clock
        self._wall = wall
        self._last = Observation()
        self._gates: dict[str, Gate] = {}
        self._spent_usd = 0.0
        self._costs_at = float("-inf")

    def tell(self, snapshot: RunSnapshot) -> None:
        """Tell what is new since the last call."""
        before, self._last = self._last, snapshot.observation
        for news in (*news_between(before, snapshot.observation), *self._of_costs(snapshot)):
            self._tell(news, snapshot.attempt.directory.run)

    def _tell(self, news: News, run: str) -> None:
        gate = self._gates.setdefault(news.name, Gate(FEWER.get(news.name, MOST)))
        if gate.lets_through(self._clock()):
            left_out = gate.take_left_out()
            self._emit(news.name, run, news.payload | ({"left_out": left_out} if left_out else {}))

    def _of_costs(self, snapshot: RunSnapshot) -> Iterator[News]:
        pool, now = snapshot.attempt.job.pool, self._clock()
        if not isinstance(pool, AwsPool) or not pool.budget_usd or now - self._costs_at < COSTS_PERIOD_S:
            return
        self._costs_at = now
        spent = total_usd(read_costs(snapshot.attempt.directory.path), self._wall())
        before, self._spent_usd = self._spent_usd, spent
        yield from news_of_costs(before, spent, pool.budget_usd)


class Gate:
    """Lets so many through within the window, and counts what it kept back."""

    def __init__(self, most: int) -> None:
        self._through: deque[float] = deque(maxlen=most)
        self._left_out = 0

    def lets_through(self, now: float) -> bool:
        """Return whether one more may pass now."""
        if len(self._through) == self._through.maxlen and now - self._through[0] < WINDOW_S:
            self._left_out += 1
            return False
        self._through.append(now)
        return True

    def take_left_out(self) -> int:
        """Return how many were kept back since the last call."""
        left_out, self._left_out = self._left_out, 0
        return left_out


def emit_to_prefect(event: str, run: str, payload: dict[str, Any]) -> None:
    """Queue an event for the server, for the resource `elastic.run.RUN`."""
    resource = {"prefect.resource.id": f"elastic.run.{run}", "prefect.resource.name": run}
    emit_event(event, resource=resource, payload=payload)
