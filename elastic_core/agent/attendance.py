"""The dead-man timer: a run that no flow has driven for too long saves its state and ends.

A flow may die and never come back, and nodes that train on cost money. Each agent looks
for the owner's key from time to time; whoever finds first that it was away for longer than
declared asks the whole run to stop, unless a flow came in that very moment.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Final

import structlog

from elastic_core.clock import Clock
from elastic_core.errors import StoreError
from elastic_core.ids import NO_REVISION
from elastic_core.model.codec import encode
from elastic_core.model.membership import Stop
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Created, Put, Store

_LOG = structlog.get_logger()
LONGEST_PERIOD_S: Final = 30.0


@dataclass(slots=True)
class Attendance:
    """When a flow was seen last. Pure.

    Attributes:
        limit: Seconds that a run may be without a flow.
        asked_at: When the store answered, or did not, for the last time.
        alone_s: Seconds without a flow, by the store's own word; an agent's start counts as a flow.
    """

    limit: float
    asked_at: float
    alone_s: float = 0.0

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        return min(self.limit / 4, LONGEST_PERIOD_S)

    def note(self, is_there: bool | None, now: float) -> bool:
        """Take in what the store says, and return whether the run was alone for too long.

        Args:
            is_there: Whether a flow drives the run; None while the store says nothing: such time
                does not count, for a flow's lease may end with the store and come back with it.
            now: Monotonic time.
        """
        since, self.asked_at = now - self.asked_at, now
        if is_there is not None:
            self.alone_s = 0.0 if is_there else self.alone_s + since
        return self.alone_s > self.limit


class FlowWatch:
    """Looks for the flow on a thread of its own, until the run was asked to stop."""

    def __init__(self, store: Store, keys: RunKeys, *, limit: float, clock: Clock) -> None:
        self._store = store
        self._keys = keys
        self._clock = clock
        self._attendance = Attendance(limit, clock.monotonic())
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="flow-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; a question that it asks just now is not waited for."""
        self._closing.set()
        self._thread.join(timeout=0.1)

    def _run(self) -> None:
        while not self._closing.wait(self._attendance.period):
            try:
                if self._look():
                    return
            except StoreError:
                self._attendance.note(None, self._clock.monotonic())

    def _look(self) -> bool:
        """Return whether the run was alone for too long and was asked to stop."""
        is_there = self._store.read(self._keys.owner) is not None
        if not self._attendance.note(is_there, self._clock.monotonic()):
            return False
        reason = f"no flow drove the run for {self._attendance.limit:g} s"
        nobody = Created(self._keys.owner, NO_REVISION), Created(self._keys.stop, NO_REVISION)
        asked = self._store.transact(nobody, [Put(self._keys.stop, encode(Stop(reason=reason)))])
        if asked.succeeded:
            _LOG.warning("asking the run to stop", reason=reason)
        return asked.succeeded or self._store.read(self._keys.stop) is not None
