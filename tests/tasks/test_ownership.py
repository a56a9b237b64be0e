"""One flow a run: a second is refused, a dead one waited for, and one that was followed writes no more."""

import threading
import time

import pytest

from elastic_core.errors import LeaseLost
from elastic_core.ids import RunId
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Entry, Put
from elastic_core.testing.memory_store import NO_ANSWER, Fault, MemoryServer, MemoryStore
from tasks import ownership
from tasks.ownership import Claim, Ownership, Verdict, judge
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


def end_ownership(server: MemoryServer, *successor: Put) -> Entry:
    """End the owner's lease, as a store does that stood still for longer; somebody may come at once."""
    store = MemoryStore(server)
    owner = store.read(KEYS.owner)
    assert owner is not None
    with server.changed:
        store.revoke(owner.lease)
        store.transact([], successor)
    return owner


def next_owner(server: MemoryServer, before: Entry) -> Entry:
    deadline = time.monotonic() + 5
    while (owner := MemoryStore(server).read(KEYS.owner)) is None or owner.created == before.created:
        assert time.monotonic() < deadline, "nobody owns the run"
    return owner


def write_target(owner: Ownership, store: MemoryStore) -> None:
    """Write as the loop does, again until it stands: between two ownerships nothing is written."""
    deadline = time.monotonic() + 5
    while store.read(KEYS.target) is None:
        assert time.monotonic() < deadline, "the owner cannot write"
        owner.write_new(KEYS.target, b"3")


def test_an_owner_whose_lease_ended_takes_the_run_again_if_nobody_else_did(server: MemoryServer) -> None:
    lost = threading.Event()
    with owning(server, lost) as mine:
        again = next_owner(server, end_ownership(server))
        next_owner(server, end_ownership(server))
        assert again.lease
        write_target(mine, MemoryStore(server))
        assert not mine.is_lost()
    assert not lost.is_set()
    assert MemoryStore(server).read(KEYS.owner) is None


@pytest.mark.parametrize(
    "fault",
    [
        Fault(call="grant", error=NO_ANSWER.error),
        Fault(call="transact", error=NO_ANSWER.error),
        Fault(call="transact", error=NO_ANSWER.error, applied=True),
    ],
    ids=["no lease", "not taken", "taken unheard"],
)
def test_a_run_is_taken_again_as_soon_as_the_store_answers(server: MemoryServer, fault: Fault) -> None:
    store = MemoryStore(server)
    with Ownership(store, KEYS, owner="a flow", lost=lambda: None) as mine:
        store.faults.append(fault)
        next_owner(server, end_ownership(server))
        write_target(mine, store)
        assert not mine.is_lost()
    assert store.faults == []


def test_nothing_is_written_between_two_ownerships(server: MemoryServer) -> None:
    store = MemoryStore(server)
    with Ownership(store, KEYS, owner="a flow", lost=lambda: None) as mine:
        released = threading.Event()
        store.faults.append(Fault(call="grant", until=released))
        before = end_ownership(server)
        mine.write_new(KEYS.target, b"3")
        assert store.read(KEYS.target) is None
        released.set()
        next_owner(server, before)


def test_an_owner_that_was_followed_hears_of_it_and_its_writes_are_refused(server: MemoryServer) -> None:
    lost = threading.Event()
    with owning(server, lost) as mine:
        end_ownership(server, Put(KEYS.owner, b"another flow"))
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


# ---- what belongs to nobody ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("claim", "options", "is_orphan", "reason"),
    [
        (Claim(is_known=True, is_driven=True), {"has_expired": True}, False, "a flow drives its run"),
        (Claim(is_known=True), {"has_expired": True}, True, "its time is over"),
        (Claim(is_known=False), {}, True, "its run's directory is gone"),
        (
            Claim(is_known=False),
            {"is_foreign": True},
            False,
            "its run is not known here: another machine's",
        ),
        (Claim(is_known=True, outcome="succeeded"), {}, True, "its run ended: succeeded"),
        (
            Claim(is_known=True, unattended_s=3600.0),
            {},
            True,
            "no flow drives its run since 60 min",
        ),
        (
            Claim(is_known=True, unattended_s=119.0),
            {},
            False,
            "no flow drives its run since 119 s; a start adopts it, kept 60 min",
        ),
    ],
)
def test_who_owns_a_thing(claim: Claim, options: dict[str, bool], is_orphan: bool, reason: str) -> None:
    asked = {"has_expired": False, "is_foreign": False, **options}
    assert judge(claim, abandoned_after_s=3600.0, **asked) == Verdict(is_orphan=is_orphan, reason=reason)
