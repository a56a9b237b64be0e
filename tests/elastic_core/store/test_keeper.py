from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest

from elastic_core.clock import SystemClock
from elastic_core.errors import StoreUnavailable
from elastic_core.ids import LeaseId
from elastic_core.store.keeper import LeaseKeeper, Renewal

LEASE = LeaseId(7)


class ScriptedStream:
    """A stream whose answers the test puts; `None` ends it, an exception breaks it."""

    def __init__(self, requests: Iterator[LeaseId]) -> None:
        self.asked: queue.SimpleQueue[LeaseId] = queue.SimpleQueue()
        self.answers: queue.SimpleQueue[tuple[LeaseId, float] | Exception | None] = queue.SimpleQueue()
        self.canceled = threading.Event()
        self.abandoned = threading.Event()
        threading.Thread(target=self._pull, args=(requests,), daemon=True).start()

    def __iter__(self) -> Iterator[tuple[LeaseId, float]]:
        while (answer := self.answers.get()) is not None:
            if isinstance(answer, Exception):
                raise answer
            yield answer

    def cancel(self) -> None:
        self.canceled.set()
        self.answers.put(StoreUnavailable("canceled"))

    def abandon(self) -> None:
        self.abandoned.set()
        self.answers.put(StoreUnavailable("abandoned"))

    def _pull(self, requests: Iterator[LeaseId]) -> None:
        for lease in requests:
            self.asked.put(lease)


class Streams:
    """Hands out scripted streams and lets the test wait for each."""

    def __init__(self) -> None:
        self._opened: queue.SimpleQueue[ScriptedStream] = queue.SimpleQueue()

    def __call__(self, requests: Iterator[LeaseId]) -> ScriptedStream:
        stream = ScriptedStream(requests)
        self._opened.put(stream)
        return stream

    def next(self) -> ScriptedStream:
        return self._opened.get(timeout=5)


@pytest.fixture
def streams() -> Streams:
    return Streams()


@pytest.fixture
def keeper(streams: Streams) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(streams, clock=SystemClock(), silence_s=0.3)
    yield keeper
    keeper.close()


def test_a_lease_is_asked_for_at_once_and_three_times_a_ttl(keeper: LeaseKeeper, streams: Streams) -> None:
    started = SystemClock().monotonic()
    keeper.keep(LEASE, 0.3)
    stream = streams.next()
    for _ in range(4):
        stream.answers.put((stream.asked.get(timeout=1), 0.3))
    assert SystemClock().monotonic() - started >= 0.3


def test_a_ttl_of_zero_is_the_loss_of_that_lease_only(keeper: LeaseKeeper, streams: Streams) -> None:
    mine, other = keeper.keep(LEASE, 60), keeper.keep(LeaseId(8), 60)
    stream = streams.next()
    asked = {stream.asked.get(timeout=1), stream.asked.get(timeout=1)}
    stream.answers.put((LEASE, 0.0))

    assert asked == {7, 8}
    assert mine.wait_lost(5) is True
    assert other.wait_lost(0.05) is False


def test_a_broken_stream_is_made_anew_and_asks_at_once_without_a_loss(
    keeper: LeaseKeeper, streams: Streams
) -> None:
    renewal = keeper.keep(LEASE, 60)
    for _ in range(3):
        stream = streams.next()
        stream.asked.get(timeout=1)
        stream.answers.put(StoreUnavailable("arranged"))
    assert renewal.wait_lost(0.01) is False


def test_a_stream_without_answers_is_abandoned_and_made_anew(keeper: LeaseKeeper, streams: Streams) -> None:
    renewal = keeper.keep(LEASE, 60)
    silent = streams.next()
    again = streams.next()

    assert silent.abandoned.is_set()
    again.answers.put((again.asked.get(timeout=1), 60.0))
    assert renewal.wait_lost(0.05) is False


def test_a_silent_stream_is_left_while_a_third_of_the_ttl_is_still_to_come(streams: Streams) -> None:
    keeper = LeaseKeeper(streams, clock=SystemClock(), silence_s=60)
    keeper.keep(LEASE, 1.5)
    stream = streams.next()
    stream.answers.put((stream.asked.get(timeout=5), 1.5))
    renewed = SystemClock().monotonic()
    stream.asked.get(timeout=5)  # and no answer: after 0.5 s, not after `silence_s`
    streams.next().asked.get(timeout=5)
    keeper.close()
    assert SystemClock().monotonic() - renewed < 1.5


def test_last_renewed_is_when_the_confirmed_renewal_was_asked_for(
    keeper: LeaseKeeper, streams: Streams
) -> None:
    renewal = keeper.keep(LEASE, 60)
    stream = streams.next()
    stream.asked.get(timeout=1)
    asked = SystemClock().monotonic()
    assert renewal.wait_lost(0.1) is False

    stream.answers.put((LEASE, 60.0))
    second = keeper.keep(LeaseId(8), 60)
    stream.answers.put((stream.asked.get(timeout=1), 0.0))  # read after the first answer
    assert second.wait_lost(5) is True

    assert renewal.last_renewed <= asked


def test_a_bug_in_the_thread_reaches_whoever_waits(keeper: LeaseKeeper, streams: Streams) -> None:
    renewal = keeper.keep(LEASE, 60)
    streams.next().answers.put(ZeroDivisionError("arranged"))
    with pytest.raises(RuntimeError, match="lease keeper's thread failed") as caught:
        renewal.wait_lost(5)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_lease_dropped_while_its_stream_opens_leaves_no_thread(streams: Streams) -> None:
    renewals: list[Renewal] = []
    began = threading.Event()

    def open_stream(requests: Iterator[LeaseId]) -> ScriptedStream:
        began.wait(5)
        renewals[0].close()
        return streams(requests)

    keeper = LeaseKeeper(open_stream, clock=SystemClock())
    renewals.append(keeper.keep(LEASE, 60))
    began.set()
    assert streams.next().canceled.wait(5)
    keeper.close()


def test_the_thread_ends_with_the_last_lease_and_begins_with_the_next(
    keeper: LeaseKeeper, streams: Streams
) -> None:
    keeper.keep(LEASE, 60).close()
    keeper.close()
    assert "lease-keeper" not in [thread.name for thread in threading.enumerate()]

    renewal = keeper.keep(LEASE, 60)
    while (stream := streams.next()).canceled.is_set():
        pass
    stream.answers.put((stream.asked.get(timeout=1), 0.0))
    assert renewal.wait_lost(5) is True
