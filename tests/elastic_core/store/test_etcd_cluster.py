"""A cluster of three with TLS and users: its clients outlive any one of its members."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import pytest

from elastic_core.errors import StoreUnavailable
from elastic_core.store.endpoint import Credentials
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.protocol import KeyDeleted, KeyWritten, WatchRestarted
from elastic_core.store.server import EtcdServer
from elastic_core.testing.etcd_cluster import EtcdCluster
from elastic_core.testing.freeze import frozen
from tests.elastic_core.store.certificates import Authority
from tests.elastic_core.store.collector import Collector

pytestmark = pytest.mark.slow

TTL_S = 3.0
"""The agents' default."""

PASSWORDS = {"root": "r00t", "trainer": "s3cret"}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    tls = Authority(tmp_path_factory.mktemp("tls") / "authority").issue("127.0.0.1")
    with EtcdCluster(tmp_path_factory.mktemp("members"), tls=tls, token_ttl_s=1) as made:
        made.console("member-1").set_up_users({"trainer": ["/a/"]}, PASSWORDS)
        yield made


@pytest.fixture
def cluster(guarded: EtcdCluster) -> Iterator[EtcdCluster]:
    """The cluster, whole again after each test."""
    yield guarded
    for server in guarded.members.values():
        if not server.pid:
            server.start()


@pytest.fixture
def client(cluster: EtcdCluster) -> Iterator[EtcdStore]:
    credentials = Credentials("trainer", PASSWORDS["trainer"])
    with contextlib.closing(EtcdStore(cluster.endpoints, tls=cluster.tls, credentials=credentials)) as store:
        yield store


def until_answered(call: Callable[[], object], within_s: float = 15.0) -> None:
    """Repeat a write that gets no answer, as agents do."""
    deadline = time.monotonic() + within_s
    while True:
        try:
            call()
        except StoreUnavailable:
            assert time.monotonic() < deadline, f"no answer within {within_s} s"
        else:
            return


def await_value(events: Collector, value: bytes) -> None:
    """Wait until the watch told of a value, as a change or in what it read anew."""
    seen = b""
    while seen != value:
        match events.next():
            case KeyWritten(entry=entry):
                seen = entry.value
            case WatchRestarted(snapshot=snapshot):
                seen = snapshot.entries[0].value if snapshot.entries else b""


def first(cluster: EtcdCluster) -> EtcdServer:
    """The member that a new client uses."""
    return cluster.members["member-1"]


def lose_first(cluster: EtcdCluster) -> None:
    first(cluster).kill()


def lose_leader(cluster: EtcdCluster) -> None:
    """The leader is also the member in use."""
    cluster.move_leader("member-1")
    first(cluster).kill()


@pytest.mark.parametrize("lose", [lose_first, lose_leader])
def test_calls_a_watch_and_a_lease_outlive_the_member_that_they_use(
    cluster: EtcdCluster, client: EtcdStore, lose: Callable[[EtcdCluster], None]
) -> None:
    lease = client.grant(TTL_S)
    client.put("/a/lives", b"", lease)
    keeper = client.keep_alive(lease, TTL_S)
    with Collector(client.watch(["/a/key"])) as events:
        assert isinstance(events.next(), WatchRestarted)
        lose(cluster)
        lost_at = time.monotonic()
        until_answered(lambda: client.put("/a/key", b"new"))
        events.next_restart()
        until_answered(lambda: client.put("/a/key", b"newer"))
        await_value(events, b"newer")
    assert keeper.wait_lost(max(0.0, lost_at + 2 * TTL_S - time.monotonic())) is False
    assert keeper.last_renewed > lost_at + TTL_S / 2
    assert client.read("/a/lives") is not None


def test_a_frozen_member_costs_neither_a_read_nor_a_lease_and_no_watch_for_long(
    cluster: EtcdCluster, client: EtcdStore
) -> None:
    lease = client.grant(TTL_S)
    client.put("/a/lives", b"", lease)
    keeper = client.keep_alive(lease, TTL_S)
    cluster.move_leader("member-2")
    with Collector(client.watch(["/a/key"])) as events:
        assert isinstance(events.next(), WatchRestarted)
        assert keeper.wait_lost(0.5) is False
        with frozen(first(cluster).pid):
            began = time.monotonic()
            events.next_restart(timeout=4.0)  # a ping would tell after 9 s, the silent lease does after 2 s
            client.read("/a/key")
            assert keeper.wait_lost(max(0.0, began + 2 * TTL_S - time.monotonic())) is False
    assert client.read("/a/lives") is not None


def test_a_new_leader_costs_no_lease_and_no_event(cluster: EtcdCluster, client: EtcdStore) -> None:
    keeper = client.keep_alive(client.grant(TTL_S), TTL_S)
    with Collector(client.watch(["/a/key"])) as events:
        events.next()
        for number, heir in enumerate(("member-2", "member-3", "member-1")):
            cluster.move_leader(heir)
            until_answered(lambda value=b"%d" % number: client.put("/a/key", value))  # type: ignore[misc]
        await_value(events, b"2")
    assert keeper.wait_lost(0) is False


def test_without_a_majority_calls_end_by_their_deadline_and_come_back_with_it(
    cluster: EtcdCluster, client: EtcdStore
) -> None:
    cluster.members["member-2"].kill()
    cluster.members["member-3"].kill()
    began = time.monotonic()
    with pytest.raises(StoreUnavailable):
        client.put("/a/key", b"lost")
    assert time.monotonic() - began < 3.0
    cluster.members["member-3"].start()
    until_answered(lambda: client.put("/a/key", b"back"))
    entry = client.read("/a/key")
    assert entry is not None
    assert entry.value == b"back"


def test_an_expired_token_is_renewed_unnoticed(cluster: EtcdCluster, client: EtcdStore) -> None:
    client.put("/a/brief", b"", client.grant(TTL_S))
    with Collector(client.watch(["/a/brief"])) as events:
        while not isinstance(events.next(timeout=10), KeyDeleted):  # it lives longer than an unused token
            pass
    assert client.read("/a/brief") is None
