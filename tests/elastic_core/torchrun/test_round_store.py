from __future__ import annotations

import datetime
import threading

import pytest
from torch.distributed import DistStoreError
from torch.distributed.elastic.utils import store as store_util

from elastic_core.errors import StoreUnavailable
from elastic_core.testing.memory_store import (
    NO_ANSWER,
    NO_ANSWER_YET_APPLIED,
    Fault,
    MemoryServer,
    MemoryStore,
)
from elastic_core.torchrun.round_store import RoundStore


@pytest.fixture
def client() -> MemoryStore:
    return MemoryStore(MemoryServer())


@pytest.fixture
def store(client: MemoryStore) -> RoundStore:
    store = RoundStore(client, "/r/1/")
    store.set_timeout(datetime.timedelta(seconds=5))
    return store


def test_values_are_text_or_bytes_and_come_back_as_bytes(store: RoundStore) -> None:
    store.set("a", "text")
    store.set("b", b"\x00\xff")
    assert store.multi_get(["b", "a"]) == [b"\x00\xff", b"text"]


def test_get_waits_for_the_value(store: RoundStore) -> None:
    writer = threading.Timer(0.1, store.set, ("late", "1"))
    writer.start()
    assert store.get("late") == b"1"
    writer.join()


def test_a_wait_ends_by_its_timeout_and_names_what_is_missing(store: RoundStore) -> None:
    store.set("a", "1")
    with pytest.raises(DistStoreError, match=r"no value for \['b'\] within 0\.1 s"):
        store.wait(["a", "b"], datetime.timedelta(seconds=0.1))


def test_more_keys_than_a_transaction_holds_can_be_awaited(store: RoundStore) -> None:
    keys = [f"k{number}" for number in range(150)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]


def test_rounds_do_not_see_each_other(store: RoundStore, client: MemoryStore) -> None:
    store.set("a", "1")
    other = RoundStore(client, "/r/2/")
    assert store.check(["a"])
    assert not other.check(["a"])
    assert (store.num_keys(), other.num_keys()) == (1, 0)


def test_additions_of_many_threads_are_all_counted(store: RoundStore, client: MemoryStore) -> None:
    sums: list[int] = []
    stores = [RoundStore(MemoryStore(client.server), "/r/1/") for _ in range(8)]
    threads = [threading.Thread(target=lambda each=each: sums.append(each.add("n", 2))) for each in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert sorted(sums) == [2, 4, 6, 8, 10, 12, 14, 16]


@pytest.mark.parametrize("fault", [NO_ANSWER, NO_ANSWER_YET_APPLIED])
def test_an_addition_whose_answer_was_lost_counts_once(
    store: RoundStore, client: MemoryStore, fault: Fault
) -> None:
    client.faults.append(Fault(call="transact", error=StoreUnavailable("arranged"), applied=fault.applied))
    assert store.add("n", 1) == 1
    assert store.add("n", 1) == 2


def test_compare_set_writes_only_over_what_is_expected(store: RoundStore) -> None:
    assert store.compare_set("a", "", "1") == b"1"
    assert store.compare_set("a", "2", "3") == b"1"
    assert store.compare_set("a", "1", "3") == b"3"
    assert store.compare_set("none", "1", "2") == b"1"
    assert store.get("a") == b"3"


def test_a_deleted_key_is_gone(store: RoundStore) -> None:
    store.set("a", "1")
    assert store.delete_key("a") is True
    assert store.delete_key("a") is False


def test_the_barrier_of_torch_lets_all_agents_through_together(client: MemoryStore) -> None:
    stores = [RoundStore(MemoryStore(client.server), "/r/1/") for _ in range(3)]
    threads = [
        threading.Thread(target=store_util.barrier, args=(each, 3, "exit"), kwargs={"barrier_timeout": 5})
        for each in stores
    ]
    for thread in threads[:2]:
        thread.start()
    threads[0].join(0.2)
    assert threads[0].is_alive()
    threads[2].start()
    for thread in threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in threads)
