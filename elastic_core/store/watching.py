"""A watch that never ends by itself: it reads, follows, and reads again after any break.

Resuming from the last seen revision would save the second read, but after a stall
changes of different keys may have overtaken each other, so only a fresh read is
always right. Reads and streams come from the store's adapter; this module knows no
protocol.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import structlog

from elastic_core.errors import StoreUnavailable
from elastic_core.store.protocol import WatchEvent

_LOG: Final = structlog.get_logger(__name__)

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.2


class WatchSource(Protocol):
    """Where a watch reads and follows."""

    def follow(self) -> Iterator[WatchEvent]:
        """Yield a `WatchRestarted`, then the changes from there; end when the server cannot go on.

        Raises:
            StoreUnavailable: The store is away, or the stream broke.
        """
        ...

    def cancel(self) -> None:
        """Break what `follow` waits for, now and from now on; from any thread."""
        ...


class ResumingWatch:
    """The store's `Watch`, driven by whoever iterates: it has no thread that could die unseen."""

    def __init__(self, source: WatchSource, *, name: str) -> None:
        self._source = source
        self._name = name
        self._closed = threading.Event()

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield events until `close`.

        Raises:
            StoreRefused: The store does not permit to watch these keys.
        """
        pause = _FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                for event in self._source.follow():
                    pause = _FIRST_PAUSE_S
                    yield event
                reason = "compacted, or ended by the server"
            except StoreUnavailable as error:
                reason = str(error)
            if not self._closed.wait(pause):
                _LOG.info("watch restarts", watch=self._name, reason=reason)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def close(self) -> None:
        """End the stream; an iterator that waits ends at once."""
        self._closed.set()
        self._source.cancel()


def distinct(keys: Sequence[str], prefixes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the keys and prefixes without those that another prefix covers: no event comes twice.

    Raises:
        ValueError: There is nothing to watch.
    """
    if not keys and not prefixes:
        raise ValueError("a watch needs a key or a prefix")
    unique = list(dict.fromkeys(prefixes))
    outer = [
        prefix
        for prefix in unique
        if not any(prefix != other and prefix.startswith(other) for other in unique)
    ]
    single = [key for key in dict.fromkeys(keys) if not any(key.startswith(prefix) for prefix in outer)]
    return single, outer
