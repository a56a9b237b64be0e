"""One flow a run: the second is refused, a dead one's lease is waited for, a lost one writes no more."""

import threading

import pytest

from elastic_core.errors import LeaseLost
from elastic_core.ids import RunId
from elastic_core.store.keys import RunKeys
from elastic_core.testing.memory_store import MemoryServer, MemoryStore
from tasks import ownership
from tasks.ownership import Ownership
from tasks.runs import AlreadyRunning

KEYS = RunKeys(RunId("digits-1"))


@pytest.fixture
def server() -> MemoryServer:
    return MemoryServer()


def owning(server: MemoryServer, lost: threading.Event | None = None) -> Ownership:
    return Ownership(MemoryStore(server), KEYS, owner="a flow", lost=(lost or threading.Event()).set)


def test_a_second_owner_is_refused_and_told_who_holds_the_run(
    server: MemoryServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ownership, "TTL_S", 0.2)
    with owning(server), pytest.raises(AlreadyRunning, match="a flow on "):
        owning(server).__enter__()


def test_a_run_that_was_given_back_can_be_taken_at_once(server: MemoryServer) -> None:
    with owning(server):
        pass
    with owning(server) as second:
        second.write_new(KEYS.target, b"2")
    target = MemoryStore(server).read(KEYS.target)
    assert target is not None
    assert target.value == b"2"


def test_a_dead_owners_lease_is_waited_for(server: MemoryServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ownership, "TTL_S", 0.5)
    dead = MemoryStore(server)
    dead.put(KEYS.owner, b"dead", dead.grant(0.3))
    with owning(server) as mine:
        assert not mine.is_lost()


def test_a_lost_owner_hears_of_it_and_its_writes_are_refused(server: MemoryServer) -> None:
    lost = threading.Event()
    with owning(server, lost) as mine:
        owner = MemoryStore(server).read(KEYS.owner)
        assert owner is not None
        MemoryStore(server).revoke(owner.lease)
        assert lost.wait(5)
        assert mine.is_lost()
        with pytest.raises(LeaseLost):
            mine.write_new(KEYS.target, b"3")
    assert MemoryStore(server).read(KEYS.target) is None


def test_what_somebody_wrote_first_is_not_overruled(server: MemoryServer) -> None:
    MemoryStore(server).put(KEYS.target, b"3")
    with owning(server) as mine:
        mine.write_new(KEYS.target, b"2")
    target = MemoryStore(server).read(KEYS.target)
    assert target is not None
    assert target.value == b"3"
