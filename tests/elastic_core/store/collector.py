"""A thread that iterates a watch, as agents do, and hands its events to the test."""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Self

from elastic_core.store.protocol import Watch, WatchEvent, WatchRestarted


class Collector:
    """Iterates a watch until the block ends; the iterator must have ended by then."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.error: BaseException | None = None
        self._events: queue.SimpleQueue[WatchEvent] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.watch.close()
        self.thread.join(1.0)
        assert not self.thread.is_alive(), "the iterator did not end within a second of close()"
        if self.error is not None and error is None:
            raise self.error

    def next(self, timeout: float = 5.0) -> WatchEvent:
        """Return the next event."""
        return self._events.get(timeout=timeout)

    def next_restart(self, timeout: float = 10.0) -> WatchRestarted:
        """Return the next restart, passing over other events."""
        while not isinstance(event := self.next(timeout), WatchRestarted):
            pass
        return event

    def is_empty(self) -> bool:
        """Return whether nothing waits to be taken."""
        return self._events.empty()

    def _run(self) -> None:
        try:
            for event in self.watch:
                self._events.put(event)
        except BaseException as error:
            self.error = error
