"""Keeping leases alive: one stream for all leases of a store, re-made for as long as it takes.

Each lease is asked to be renewed every third of its TTL. A lease is lost when the
store says so and at no other time: a store that is away, frozen or restarted
costs misses, which are counted and warned of. The stream itself comes from the
store's adapter, so that this module knows no protocol.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, Protocol

import structlog

from elastic_core.clock import Clock
from elastic_core.errors import StoreError
from elastic_core.ids import LeaseId

_LOG: Final = structlog.get_logger(__name__)

RENEWALS_PER_TTL: Final = 3
SILENCE_S: Final = 2.0
"""A renewal without an answer for so long, or for the time between two renewals if that is shorter,
breaks the stream: its connection may be half open, or the member of the cluster behind it frozen. A
third of the TTL is then left to renew the lease elsewhere."""

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 0.5


class RenewalStream(Protocol):
    """Answers to renewals: pairs of a lease and its new TTL in seconds, 0 if there is no such lease.

    Iterating raises `StoreError` when the stream breaks.
    """

    def __iter__(self) -> Iterator[tuple[LeaseId, float]]:
        """Yield the answers; those of one lease in the order of its requests."""
        ...

    def cancel(self) -> None:
        """End the stream, from any thread."""
        ...

    def abandon(self) -> None:
        """Break the stream because it is silent, from any thread; the next one uses a new connection."""
        ...


OpenStream = Callable[[Iterator[LeaseId]], RenewalStream]


class Renewal:
    """One lease that is renewed; the store's `KeepAlive`."""

    def __init__(self, keeper: LeaseKeeper, lease: LeaseId, *, interval_s: float, now: float) -> None:
        self.lease = lease
        self.interval_s = interval_s
        self.due = now
        self.asked: deque[float] = deque()  # times of the requests that this stream has not answered
        self.renewed = now
        self.lost = False
        self.closed = False
        self._keeper = keeper

    @property
    def last_renewed(self) -> float:
        """Monotonic time at which the last confirmed renewal was asked for.

        The lease lives for at least its TTL from then on, whenever the answer came.
        """
        return self.renewed

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the store says that the lease is gone; return False on timeout or close.

        Raises:
            RuntimeError: The renewing thread met an error that is not the store's: a bug.
        """
        return self._keeper.wait_lost(self, timeout_s)

    def close(self) -> None:
        """Stop renewing; the lease lives on until its TTL ends or it is revoked."""
        self._keeper.drop(self)


class LeaseKeeper:
    """Renews the leases of one store from one thread, which lives while there are leases."""

    def __init__(self, open_stream: OpenStream, *, clock: Clock, silence_s: float = SILENCE_S) -> None:
        self._open_stream = open_stream
        self._clock = clock
        self._longest_silence_s = silence_s
        self._changed = threading.Condition()
        self._renewals: dict[LeaseId, Renewal] = {}
        self._stream: RenewalStream | None = None
        self._stream_number = 0
        self._misses = 0
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def keep(self, lease: LeaseId, ttl_s: float) -> Renewal:
        """Renew a lease from now on, at once for the first time."""
        renewal = Renewal(self, lease, interval_s=ttl_s / RENEWALS_PER_TTL, now=self._clock.monotonic())
        with self._changed:
            self._renewals[lease] = renewal
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return renewal

    def drop(self, renewal: Renewal) -> None:
        """Renew it no more, and wake whoever waits for its loss."""
        with self._changed:
            renewal.closed = True
            if self._renewals.get(renewal.lease) is renewal:
                del self._renewals[renewal.lease]
            stream = None if self._renewals else self._stream
            self._changed.notify_all()
        if stream is not None:
            stream.cancel()

    def wait_lost(self, renewal: Renewal, timeout_s: float | None) -> bool:
        """Block until the renewal is lost, closed, or the time is over; return whether it is lost."""
        with self._changed:
            self._changed.wait_for(lambda: renewal.lost or renewal.closed or self._error, timeout_s)
            if self._error is not None and not renewal.lost:
                raise RuntimeError("the lease keeper's thread failed") from self._error
            return renewal.lost

    def close(self, timeout_s: float = 2.0) -> None:
        """Stop renewing all leases and end the thread."""
        with self._changed:
            thread = self._thread
            renewals = list(self._renewals.values())
        for renewal in renewals:
            self.drop(renewal)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    # ---- the keeper's thread: opens streams and reads answers ---------------------------------

    def _run(self) -> None:
        pause = _FIRST_PAUSE_S
        try:
            while self._begin_stream():
                if self._read_answers():
                    pause = _FIRST_PAUSE_S
                with self._changed:
                    self._changed.wait_for(lambda: not self._renewals, pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)
        except Exception as error:  # re-raised to everyone who waits for a lease
            self._fail(error)

    def _begin_stream(self) -> bool:
        """Make every lease due on a new stream; end the thread if there is none."""
        with self._changed:
            if not self._renewals:
                self._thread = None
                return False
            self._stream_number += 1
            now = self._clock.monotonic()
            for renewal in self._renewals.values():
                renewal.due = now
                renewal.asked.clear()
            self._changed.notify_all()
            return True

    def _read_answers(self) -> bool:
        """Read one stream to its end; return whether it gave any answer."""
        answered = False
        reason = "the stream ended"
        try:
            stream = self._open_stream(self._requests(self._stream_number))
            with self._changed:
                self._stream = stream
                is_needless = not self._renewals  # dropped while it opened: nobody could cancel it
            if is_needless:
                stream.cancel()
            for lease, ttl_s in stream:
                answered = True
                self._take_answer(lease, ttl_s)
        except StoreError as error:
            reason = str(error)
        with self._changed:
            self._stream = None
        self._count_miss(reason)
        return answered

    def _take_answer(self, lease: LeaseId, ttl_s: float) -> None:
        with self._changed:
            if self._misses:
                _LOG.warning("lease renewed again", lease=f"{lease:x}", misses=self._misses)
                self._misses = 0
            renewal = self._renewals.get(lease)
            if renewal is None or not renewal.asked:
                return
            asked = renewal.asked.popleft()
            if ttl_s > 0:
                renewal.renewed = asked
                return
            renewal.lost = True
            del self._renewals[lease]
            self._changed.notify_all()

    def _count_miss(self, reason: str) -> None:
        with self._changed:
            waiting = len(self._renewals)
            if not waiting:
                return
            self._misses += 1
            misses = self._misses
        if misses & (misses - 1) == 0:  # the first, second, fourth…: an outage is no flood of lines
            _LOG.warning("leases not renewed", leases=waiting, misses=misses, reason=reason)

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    # ---- the stream's sending side, on whatever thread the adapter pulls requests -------------

    def _requests(self, number: int) -> Iterator[LeaseId]:
        try:
            while (leases := self._wait_due(number)) is not None:
                yield from leases
        except Exception as error:
            self._fail(error)
            raise

    def _wait_due(self, number: int) -> list[LeaseId] | None:
        """Block until leases are due on this stream; return None when it is over or silent."""
        while True:
            with self._changed:
                if number != self._stream_number or not self._renewals or self._error is not None:
                    return None
                now = self._clock.monotonic()
                silent_at = self._silent_at()
                due = [item for item in self._renewals.values() if item.due <= now]
                if now < silent_at:
                    for renewal in due:
                        renewal.due = now + renewal.interval_s
                        renewal.asked.append(now)
                    if due:
                        return [renewal.lease for renewal in due]
                    wake = min(item.due for item in self._renewals.values())
                    self._changed.wait(min(wake, silent_at) - now)
                    continue
                stream = self._stream
            if stream is not None:
                stream.abandon()
            return None

    def _silent_at(self) -> float:
        """Return when the stream has been silent for too long."""
        return min(
            (
                item.asked[0] + min(self._longest_silence_s, item.interval_s)
                for item in self._renewals.values()
                if item.asked
            ),
            default=math.inf,
        )
