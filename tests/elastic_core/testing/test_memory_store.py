"""What a test can arrange with the store in memory; what it shares with etcd is in the contract suite."""

from __future__ import annotations

import threading

import pytest

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.store.protocol import KeyDeleted, KeyWritten, Put, WatchRestarted
from elastic_core.testing.clock import ManualClock
from elastic_core.testing.memory_store import (
    NO_ANSWER,
    NO_ANSWER_YET_APPLIED,
    Fault,
    MemoryServer,
    MemoryStore,
)
from tests.elastic_core.store.collector import Collector


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(clock: ManualClock) -> MemoryStore:
    return MemoryStore(MemoryServer(clock))


def test_a_lease_ends_exactly_when_the_manual_clock_passes_its_ttl(
    store: MemoryStore, clock: ManualClock
) -> None:
    store.put("/a", b"", store.grant(5))
    clock.advance(4.9)
    assert store.read("/a") is not None
    clock.advance(0.1)
    assert store.read("/a") is None


def test_moving_the_clock_wakes_a_watch_for_the_key_that_expired(
    store: MemoryStore, clock: ManualClock
) -> None:
    store.put("/a", b"", store.grant(5))
    with Collector(store.watch(["/a"])) as events:
        events.next()
        clock.advance(5)
        assert isinstance(events.next(), KeyDeleted)


def test_a_renewed_lease_outlives_any_leap_of_the_clock(store: MemoryStore, clock: ManualClock) -> None:
    lease = store.grant(5)
    keeper = store.keep_alive(lease, 5)
    clock.advance(1_000)
    assert keeper.wait_lost(0) is False
    assert keeper.last_renewed == 1_000


def test_a_frozen_client_loses_its_lease_and_hears_of_it_only_when_it_thaws(
    store: MemoryStore, clock: ManualClock
) -> None:
    other = MemoryStore(store.server)
    lease = store.grant(5)
    store.put("/a", b"", lease)
    keeper = store.keep_alive(lease, 5)

    store.renewing = False
    clock.advance(6)

    assert other.read("/a") is None
    assert keeper.wait_lost(0) is False
    assert keeper.last_renewed == 0
    store.renewing = True
    assert keeper.wait_lost(0) is True


def test_a_fault_hits_the_first_call_that_it_fits_and_no_other(store: MemoryStore) -> None:
    store.faults.append(Fault(call="put", key="/b", error=StoreRefused("arranged")))
    store.put("/a", b"")
    with pytest.raises(StoreRefused, match="arranged"):
        store.put("/b/c", b"")
    store.put("/b/c", b"")
    assert store.calls == [("put", "/a"), ("put", "/b/c"), ("put", "/b/c")]


def test_a_call_without_an_answer_may_or_may_not_have_happened(store: MemoryStore) -> None:
    store.faults += [NO_ANSWER, NO_ANSWER_YET_APPLIED]
    for key in ("/lost", "/applied"):
        with pytest.raises(StoreUnavailable, match="no answer"):
            store.transact([], [Put(key, b"")])
    assert [entry.key for entry in store.read_prefix("/").entries] == ["/applied"]


def test_a_late_answer_is_applied_when_it_is_released(store: MemoryStore) -> None:
    release = threading.Event()
    store.faults.append(Fault(call="put", until=release))
    writer = threading.Thread(target=store.put, args=("/a", b""))
    writer.start()
    writer.join(0.05)
    assert store.read("/a") is None

    release.set()
    writer.join(5)

    assert store.read("/a") is not None


def test_a_dropped_watch_restarts_with_the_state_of_now(store: MemoryStore) -> None:
    with Collector(store.watch(["/a"])) as events:
        events.next()
        store.put("/a", b"1")
        assert isinstance(events.next(), KeyWritten)
        store.server.drop_watches()
        assert events.next() == WatchRestarted(store.read_prefix("/"))


def test_a_server_that_is_away_answers_nobody_and_renews_all_leases_when_it_is_back(
    store: MemoryStore, clock: ManualClock
) -> None:
    store.put("/a", b"", store.grant(5))
    with Collector(store.watch(["/a"])) as events:
        events.next()
        store.server.go_away()
        clock.advance(100)
        with pytest.raises(StoreUnavailable, match="away"):
            store.read("/a")
        assert events.is_empty()

        store.server.come_back()
        assert isinstance(events.next(), WatchRestarted)

    clock.advance(4.9)
    assert store.read("/a") is not None
    clock.advance(0.1)
    assert store.read("/a") is None


def test_time_does_not_go_back() -> None:
    clock = ManualClock(monotonic=3.0)
    with pytest.raises(ValueError, match="cannot go back by 1 s"):
        clock.advance(-1)
    assert clock.monotonic() == 3.0
