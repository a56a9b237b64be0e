"""The dead-man timer: who is alone for too long, and whom nobody may stop."""

import threading
import time
from collections.abc import Callable

import pytest

from elastic_core.agent.attendance import LONGEST_PERIOD_S, Attendance, FlowWatch
from elastic_core.clock import SystemClock
from elastic_core.ids import RunId
from elastic_core.model.codec import decode
from elastic_core.model.membership import Stop
from elastic_core.store.keys import RunKeys
from elastic_core.testing.memory_store import MemoryServer, MemoryStore

KEYS = RunKeys(RunId("digits-1"))
HOUR_S = 3600.0


def test_only_time_in_which_the_store_says_that_nobody_is_there_counts() -> None:
    attendance = Attendance(limit=HOUR_S, asked_at=0.0)
    assert not attendance.note(False, HOUR_S)
    assert not attendance.note(None, 3 * HOUR_S), "the store was away: nobody knows"
    assert attendance.note(False, 3 * HOUR_S + 1)


def test_a_flow_that_comes_back_in_time_starts_the_count_anew() -> None:
    attendance = Attendance(limit=HOUR_S, asked_at=0.0)
    assert not attendance.note(False, HOUR_S)
    assert not attendance.note(True, HOUR_S + 1)
    assert not attendance.note(False, 2 * HOUR_S)


@pytest.mark.parametrize(("limit", "period"), [(2.0, 0.5), (86_400.0, LONGEST_PERIOD_S)])
def test_a_look_comes_often_enough_and_never_often(limit: float, period: float) -> None:
    assert Attendance(limit=limit, asked_at=0.0).period == period


def eventually(fact: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not fact():
        assert time.monotonic() < deadline, "the fact did not come true in time"
        time.sleep(0.005)


def test_a_run_that_is_alone_is_asked_to_stop_once_and_with_the_reason() -> None:
    server = MemoryServer()
    watches = [FlowWatch(MemoryStore(server), KEYS, limit=0.1, clock=SystemClock()) for _ in range(3)]
    store = MemoryStore(server)
    eventually(lambda: store.read(KEYS.stop) is not None)
    entry = store.read(KEYS.stop)
    assert entry is not None
    assert decode(Stop, entry.value).reason == "no flow drove the run for 0.1 s"
    eventually(lambda: not any(thread.name == "flow-watch" for thread in threading.enumerate()))
    unchanged = store.read(KEYS.stop)
    assert unchanged is not None
    assert unchanged.modified == entry.created, "one agent asked, the others saw that it did"
    for watch in watches:
        watch.close()


def test_a_run_that_is_driven_is_left_alone() -> None:
    server = MemoryServer()
    store = MemoryStore(server)
    store.put(KEYS.owner, b"a flow")
    reads = 0
    looked = threading.Event()

    class Counting(MemoryStore):
        def read(self, key: str):  # type: ignore[no-untyped-def]
            nonlocal reads
            reads += key == KEYS.owner
            if reads > 10:
                looked.set()
            return super().read(key)

    watch = FlowWatch(Counting(server), KEYS, limit=0.04, clock=SystemClock())
    assert looked.wait(30), "many times its limit has passed"
    watch.close()
    assert store.read(KEYS.stop) is None
