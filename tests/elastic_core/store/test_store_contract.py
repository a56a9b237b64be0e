"""What every store does: one suite for the one in memory and the real one."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.ids import NO_LEASE, LeaseId
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.protocol import (
    Created,
    Delete,
    Entry,
    KeyDeleted,
    KeyWritten,
    Modified,
    Put,
    Store,
    WatchRestarted,
)
from elastic_core.testing.memory_store import MemoryServer, MemoryStore
from tests.elastic_core.store.collector import Collector

TTL_S = 1.0
EXPIRY_S = TTL_S + 2.0  # etcd looks every half second

_numbers = itertools.count()

Connect = Callable[[], Store]


@pytest.fixture(
    params=[
        "memory",
        "etcd",
        pytest.param("guarded", marks=pytest.mark.slow),
        pytest.param("cluster", marks=pytest.mark.slow),
    ]
)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Make clients of one store: in memory, etcd alone, etcd with TLS and users, three members."""
    make: Connect
    if request.param == "memory":
        server = MemoryServer()
        make = lambda: MemoryStore(server)  # noqa: E731
    elif request.param == "etcd":
        endpoint = request.getfixturevalue("etcd_endpoint")
        make = lambda: EtcdStore(endpoint)  # noqa: E731
    elif request.param == "guarded":
        make = request.getfixturevalue("guarded_etcd").connect
    else:
        endpoints = request.getfixturevalue("etcd_cluster").endpoints
        make = lambda: EtcdStore(endpoints)  # noqa: E731
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(contextlib.closing(make()))


@pytest.fixture
def client(connect: Connect) -> Store:
    return connect()


@pytest.fixture
def base() -> str:
    """A prefix that no other test uses."""
    return f"/contract/{next(_numbers)}/"


# ---- reading and writing ---------------------------------------------------------------------


def test_a_key_that_was_never_written_reads_as_none(client: Store, base: str) -> None:
    assert client.read(base + "a") is None


def test_an_entry_keeps_its_creation_revision_over_later_writes(client: Store, base: str) -> None:
    first = client.put(base + "a", b"1")
    second = client.put(base + "a", b"2")

    assert second == first + 1
    assert client.read(base + "a") == Entry(base + "a", b"2", created=first, modified=second, lease=NO_LEASE)


def test_a_key_that_was_deleted_and_written_again_is_another_creation(client: Store, base: str) -> None:
    first = client.put(base + "a", b"1")
    client.delete(base + "a")
    third = client.put(base + "a", b"1")

    entry = client.read(base + "a")

    assert entry is not None
    assert entry.created == third == first + 2


def test_a_prefix_is_read_sorted_and_without_its_neighbours(client: Store, base: str) -> None:
    for key in ("nodes/b", "nodes/a", "nodes", "nodesx", "nodes/c/d"):
        client.put(base + key, key.encode())

    snapshot = client.read_prefix(base + "nodes/")

    assert [entry.key for entry in snapshot.entries] == [
        base + "nodes/a",
        base + "nodes/b",
        base + "nodes/c/d",
    ]
    assert snapshot.entries[0].value == b"nodes/a"


def test_a_snapshot_carries_the_revision_it_was_read_at(client: Store, base: str) -> None:
    revision = client.put(base + "a", b"1")
    assert client.read_prefix(base + "none/").revision == revision


def test_values_are_bytes_of_any_kind(client: Store, base: str) -> None:
    value = bytes(range(256))
    client.put(base + "ä/€", value)
    entry = client.read(base + "ä/€")
    assert entry is not None
    assert entry.value == value


def test_delete_says_how_many_keys_there_were(client: Store, base: str) -> None:
    for key in ("x/1", "x/2", "y"):
        client.put(base + key, b"")

    assert client.delete(base + "x/", prefix=True) == 2
    assert client.delete(base + "y") == 1
    assert client.delete(base + "y") == 0
    assert client.read_prefix(base).entries == ()


@pytest.mark.case("E10")
def test_a_value_of_1_6_mib_is_refused_with_its_size(client: Store, base: str) -> None:
    value = bytes(1_677_722)
    with pytest.raises(StoreRefused, match="1677722 bytes"):
        client.put(base + "large", value)
    assert client.read(base + "large") is None


# ---- transactions ----------------------------------------------------------------------------


def test_a_transaction_applies_all_operations_at_one_revision(client: Store, base: str) -> None:
    client.put(base + "old", b"")
    result = client.transact(
        [Created(base + "a", 0)], [Put(base + "a", b"1"), Put(base + "b", b"2"), Delete(base + "old")]
    )

    entries = client.read_prefix(base).entries
    assert result.succeeded
    assert [(entry.key, entry.modified) for entry in entries] == [
        (base + "a", result.revision),
        (base + "b", result.revision),
    ]


def test_a_transaction_whose_condition_fails_applies_nothing(client: Store, base: str) -> None:
    revision = client.put(base + "a", b"1")
    result = client.transact([Created(base + "a", 0)], [Put(base + "a", b"2"), Put(base + "b", b"2")])

    assert not result.succeeded
    assert result.revision == revision
    assert [entry.value for entry in client.read_prefix(base).entries] == [b"1"]


def test_modified_holds_only_until_the_next_write(client: Store, base: str) -> None:
    revision = client.put(base + "a", b"1")

    first = client.transact([Modified(base + "a", revision)], [Put(base + "a", b"2")])
    again = client.transact([Modified(base + "a", revision)], [Put(base + "a", b"3")])

    assert (first.succeeded, again.succeeded) == (True, False)
    entry = client.read(base + "a")
    assert entry is not None
    assert entry.value == b"2"


def test_created_holds_over_writes_but_not_over_a_new_creation(client: Store, base: str) -> None:
    created = client.put(base + "leader", b"a")
    client.put(base + "leader", b"a again")
    assert client.transact([Created(base + "leader", created)], [Put(base + "x", b"")]).succeeded

    client.delete(base + "leader")
    client.put(base + "leader", b"b")
    assert not client.transact([Created(base + "leader", created)], [Put(base + "x", b"")]).succeeded


def test_a_missing_key_has_revision_zero_for_both_conditions(client: Store, base: str) -> None:
    conditions = [Created(base + "a", 0), Modified(base + "a", 0)]
    assert client.transact(conditions, [Put(base + "x", b"")]).succeeded
    assert not client.transact([Created(base + "a", 7)], [Put(base + "x", b"")]).succeeded


def test_128_operations_are_one_transaction_and_129_are_refused(client: Store, base: str) -> None:
    operations = [Put(f"{base}{number:03d}", b"") for number in range(129)]

    assert client.transact([], operations[:128]).succeeded
    with pytest.raises(StoreRefused, match="too many operations"):
        client.transact([], operations)
    assert len(client.read_prefix(base).entries) == 128


@pytest.mark.parametrize("also", [Put("a", b"2"), Delete("a"), Delete("", prefix=True)])
def test_a_transaction_that_writes_a_key_twice_is_refused(
    client: Store, base: str, also: Put | Delete
) -> None:
    also = Put(base + "a", b"2") if isinstance(also, Put) else Delete(base + also.key, also.prefix)
    with pytest.raises(StoreRefused, match="duplicate key"):
        client.transact([], [Put(base + "a", b"1"), also])


# ---- leases ----------------------------------------------------------------------------------


def test_revoking_a_lease_deletes_its_keys_and_no_others(client: Store, base: str) -> None:
    lease = client.grant(60)
    client.put(base + "mine", b"", lease)
    client.put(base + "other", b"")
    entry = client.read(base + "mine")

    client.revoke(lease)

    assert entry is not None
    assert entry.lease == lease
    assert [entry.key for entry in client.read_prefix(base).entries] == [base + "other"]


def test_a_key_written_again_without_its_lease_outlives_it(client: Store, base: str) -> None:
    lease = client.grant(60)
    client.put(base + "a", b"", lease)
    client.put(base + "a", b"")

    client.revoke(lease)

    assert client.read(base + "a") is not None


def test_revoking_twice_is_no_error(client: Store) -> None:
    lease = client.grant(60)
    client.revoke(lease)
    client.revoke(lease)


def test_a_lease_tells_what_it_has_left_and_one_that_is_gone_that_it_is_over(client: Store) -> None:
    lease = client.grant(60)
    assert 50 < client.remaining(lease) <= 60
    client.revoke(lease)
    assert client.remaining(lease) < 0


def test_a_write_on_a_lease_that_is_gone_is_refused(client: Store, base: str) -> None:
    lease = client.grant(60)
    client.revoke(lease)
    with pytest.raises(StoreRefused, match="lease not found"):
        client.put(base + "a", b"", lease)
    with pytest.raises(StoreRefused, match="lease not found"):
        client.transact([], [Put(base + "a", b"", lease)])


def test_a_transaction_whose_condition_fails_does_not_care_for_its_leases(client: Store, base: str) -> None:
    lease = client.grant(60)
    client.revoke(lease)
    result = client.transact([Created(base + "mine", 7)], [Put(base + "a", b"", lease)])
    assert not result.succeeded


def test_a_lease_that_nobody_renews_ends_and_its_keys_with_it(client: Store, base: str) -> None:
    lease = client.grant(TTL_S)
    client.put(base + "a", b"", lease)
    with Collector(client.watch([base + "a"])) as events:
        assert isinstance(events.next(), WatchRestarted)
        gone = events.next(timeout=EXPIRY_S)
    assert isinstance(gone, KeyDeleted)
    assert gone.key == base + "a"


def test_a_renewed_lease_lives_and_says_when_it_was_renewed(client: Store, base: str) -> None:
    lease = client.grant(TTL_S)
    client.put(base + "a", b"", lease)
    before = time.monotonic()
    keeper = client.keep_alive(lease, TTL_S)

    assert keeper.wait_lost(timeout_s=EXPIRY_S) is False

    assert client.read(base + "a") is not None
    assert keeper.last_renewed > before + EXPIRY_S - TTL_S
    keeper.close()


def test_the_loss_of_a_renewed_lease_is_noticed(connect: Connect) -> None:
    owner, other = connect(), connect()
    lease = owner.grant(TTL_S)
    keeper = owner.keep_alive(lease, TTL_S)

    other.revoke(lease)

    assert keeper.wait_lost(timeout_s=5) is True
    assert keeper.wait_lost(timeout_s=0) is True


def test_keeping_a_lease_that_is_gone_already_finds_it_lost(client: Store) -> None:
    lease = client.grant(60)
    client.revoke(lease)
    assert client.keep_alive(lease, 60).wait_lost(timeout_s=5) is True


def test_a_store_keeps_several_leases_apart(client: Store) -> None:
    leases = [client.grant(TTL_S) for _ in range(3)]
    keepers = [client.keep_alive(lease, TTL_S) for lease in leases]

    client.revoke(leases[1])

    assert [keepers[1].wait_lost(5), keepers[0].wait_lost(0.1), keepers[2].wait_lost(0.1)] == [
        True,
        False,
        False,
    ]


def test_closing_a_keeper_wakes_its_waiter_and_leaves_the_lease(client: Store, base: str) -> None:
    lease = client.grant(60)
    client.put(base + "a", b"", lease)
    keeper = client.keep_alive(lease, 60)
    answers: list[bool] = []
    waiter = threading.Thread(target=lambda: answers.append(keeper.wait_lost()))
    waiter.start()

    keeper.close()
    waiter.join(2)

    assert answers == [False]
    assert client.read(base + "a") is not None


# ---- watches ---------------------------------------------------------------------------------


def test_a_watch_begins_with_what_is_there_and_goes_on_without_a_gap(client: Store, base: str) -> None:
    client.put(base + "control/stop", b"0")
    client.put(base + "other", b"")
    with Collector(client.watch([base + "current"], [base + "control/"])) as events:
        start = events.next()
        client.put(base + "current", b"1")
        client.put(base + "unwatched", b"")
        client.delete(base + "control/stop")
        written, deleted = events.next(), events.next()

    assert isinstance(start, WatchRestarted)
    assert [entry.key for entry in start.snapshot.entries] == [base + "control/stop"]
    assert isinstance(written, KeyWritten)
    assert (written.entry.key, written.entry.value) == (base + "current", b"1")
    assert written.entry.modified == start.snapshot.revision + 1
    assert deleted == KeyDeleted(base + "control/stop", written.entry.modified + 2)


def test_changes_of_different_keys_arrive_in_the_order_in_which_they_happened(
    client: Store, base: str
) -> None:
    """From the first event on: a watch that is just being made has no past to catch up with."""
    for attempt in range(20):
        keys = [f"{base}{attempt}/{name}" for name in "abc"]
        with Collector(client.watch([keys[0], keys[2]], [keys[1]])) as events:
            events.next()
            for key in reversed(keys):
                client.put(key, b"")
            order = [event.entry.key for _ in keys if isinstance(event := events.next(), KeyWritten)]
        assert order == keys[::-1]


def test_changes_of_one_key_arrive_in_their_order_and_none_is_merged(client: Store, base: str) -> None:
    with Collector(client.watch([base + "a"])) as events:
        events.next()
        for number in range(50):
            client.put(base + "a", str(number).encode())
        values = [event.entry.value for _ in range(50) if isinstance(event := events.next(), KeyWritten)]
    assert values == [str(number).encode() for number in range(50)]


def test_a_key_that_a_prefix_covers_is_told_once(client: Store, base: str) -> None:
    with Collector(client.watch([base + "x/a"], [base + "x/", base + "x/a/"])) as events:
        start = events.next()
        client.put(base + "x/a", b"")
        client.put(base + "x/end", b"")
        keys = [event.entry.key for _ in range(2) if isinstance(event := events.next(), KeyWritten)]
        assert isinstance(start, WatchRestarted)
    assert keys == [base + "x/a", base + "x/end"]


def test_a_refused_transaction_is_no_event(client: Store, base: str) -> None:
    with Collector(client.watch([], [base])) as events:
        events.next()
        client.transact([Created(base + "a", 9)], [Put(base + "a", b"no")])
        client.put(base + "b", b"yes")
        event = events.next()
    assert isinstance(event, KeyWritten)
    assert event.entry.value == b"yes"


def test_a_watch_without_anything_to_watch_is_refused(client: Store) -> None:
    with pytest.raises(ValueError, match="needs a key or a prefix"):
        client.watch([])


def test_closing_a_watch_ends_its_waiting_iterator_within_a_second(client: Store, base: str) -> None:
    with Collector(client.watch([base + "a"])) as events:
        events.next()
        events.watch.close()
        events.thread.join(1.0)
        assert not events.thread.is_alive()
    assert events.error is None


def test_closing_a_store_ends_its_watches_and_keepers(connect: Connect, base: str) -> None:
    client = connect()
    keeper = client.keep_alive(client.grant(60), 60)
    with Collector(client.watch([base + "a"])) as events:
        events.next()
        client.close()
        events.thread.join(1.0)
        assert not events.thread.is_alive()
    assert keeper.wait_lost(timeout_s=1) is False


# ---- many clients ----------------------------------------------------------------------------


def test_of_many_who_create_a_key_exactly_one_succeeds(connect: Connect, base: str) -> None:
    def elect(name: int) -> None:
        results[name] = client.transact(
            [Created(base + "leader", 0)], [Put(base + "leader", b"%d" % name)]
        ).succeeded

    client = connect()
    results: dict[int, bool] = {}
    threads = [threading.Thread(target=elect, args=(name,)) for name in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)

    entry = client.read(base + "leader")
    assert entry is not None
    assert [name for name, won in results.items() if won] == [int(entry.value)]


def test_a_closed_store_answers_nothing(connect: Connect, base: str) -> None:
    client = connect()
    client.put(base + "a", b"")
    client.close()
    with pytest.raises(StoreUnavailable, match="closed"):
        client.read(base + "a")


def test_lease_ids_are_never_zero(client: Store) -> None:
    assert client.grant(60) not in (NO_LEASE, LeaseId(-1))
