"""What only a real server can do to its clients: restart, compact, freeze, ask for a password."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import grpc
import pytest
from etcd3 import etcdrpc

from elastic_core.errors import RefusedInput, StoreRefused, StoreUnavailable
from elastic_core.store.endpoint import Credentials
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.protocol import KeyWritten, Put, WatchRestarted
from elastic_core.store.server import EtcdServer
from elastic_core.testing.freeze import frozen
from tests.elastic_core.store.collector import Collector


@pytest.fixture
def client(etcd_server: EtcdServer) -> Iterator[EtcdStore]:
    with contextlib.closing(EtcdStore(etcd_server.endpoint)) as store:
        yield store


def compact(server: EtcdServer, revision: int) -> None:
    with grpc.insecure_channel(server.endpoint) as channel:
        etcdrpc.KVStub(channel).Compact(
            etcdrpc.CompactionRequest(revision=revision, physical=True), timeout=5
        )


# ---- restart ---------------------------------------------------------------------------------


def test_a_watch_outlives_a_restart_of_the_server(etcd_server: EtcdServer, client: EtcdStore) -> None:
    with Collector(client.watch(["/a"], ["/p/"])) as events:
        assert events.next() == WatchRestarted(client.read_prefix("/"))
        etcd_server.kill()
        etcd_server.start()
        client.put("/a", b"1")
        restarted = events.next()
        if not restarted.snapshot.entries:  # the watch was back before the write
            assert isinstance(events.next(), KeyWritten)
        client.put("/p/b", b"2")
        later = events.next()

    assert isinstance(restarted, WatchRestarted)
    assert isinstance(later, KeyWritten)
    assert later.entry.value == b"2"


def test_a_watch_tells_what_changed_while_the_server_was_away(
    etcd_server: EtcdServer, client: EtcdStore
) -> None:
    client.put("/a", b"old")
    client.put("/gone", b"")
    with Collector(client.watch(["/a", "/gone"])) as events:
        events.next()
        etcd_server.stop()
        etcd_server.start()
        restarted = events.next_restart()
        client.transact([], [Put("/a", b"new")])
        assert isinstance(events.next(), KeyWritten)
    assert [(entry.key, entry.value) for entry in restarted.snapshot.entries] == [
        ("/a", b"old"),
        ("/gone", b""),
    ]


@pytest.mark.parametrize("call", [lambda store: store.read("/a"), lambda store: store.put("/a", b"2")])
def test_a_call_waits_for_a_server_that_is_still_starting_within_its_deadline(
    etcd_server: EtcdServer, client: EtcdStore, call: Callable[[EtcdStore], object]
) -> None:
    etcd_server.kill()
    answers: list[object] = []
    caller = threading.Thread(target=lambda: answers.append(call(client)))
    caller.start()
    caller.join(0.3)
    assert answers == []

    etcd_server.start()
    caller.join(2)

    assert len(answers) == 1


def test_a_renewed_lease_outlives_a_restart(etcd_server: EtcdServer, client: EtcdStore) -> None:
    lease = client.grant(2)
    client.put("/a", b"", lease)
    keeper = client.keep_alive(lease, 2)
    etcd_server.kill()
    etcd_server.start()
    back = time.monotonic()

    assert keeper.wait_lost(timeout_s=3) is False
    assert keeper.last_renewed > back
    assert client.read("/a") is not None


def test_an_iterator_ends_within_a_second_also_while_the_server_is_away(
    etcd_server: EtcdServer, client: EtcdStore
) -> None:
    with Collector(client.watch(["/a"])) as events:  # asserts the end
        events.next()
        etcd_server.kill()
    with Collector(client.watch(["/a"])) as events:
        pass
    assert events.error is None


# ---- compaction ------------------------------------------------------------------------------


def test_a_watch_goes_on_after_a_compaction(etcd_server: EtcdServer, client: EtcdStore) -> None:
    with Collector(client.watch(["/a"])) as events:
        events.next()
        for number in range(20):
            client.put("/b", str(number).encode())
        compact(etcd_server, client.put("/b", b"last"))
        client.put("/a", b"1")
        event = events.next()
    assert isinstance(event, KeyWritten)
    assert event.entry.value == b"1"


@pytest.mark.case("E03")
def test_a_watch_that_fell_behind_a_compaction_reads_again(
    etcd_server: EtcdServer, client: EtcdStore
) -> None:
    watch = client.watch(["/a"])
    events = iter(watch)
    assert isinstance(next(events), WatchRestarted)
    for number in range(600):  # nobody reads them: the connection fills up, then etcd's own queue
        revision = client.put("/a", b"%06d" % number + bytes(16_000))
    compact(etcd_server, revision)

    seen = 0
    while not isinstance(event := next(events), WatchRestarted):
        seen += 1
    watch.close()

    assert seen < 600, "it did not fall behind"
    assert event.snapshot.entries[0].value[:6] == b"000599"


# ---- a frozen server -------------------------------------------------------------------------


@pytest.mark.case("E04")
def test_every_call_to_a_frozen_server_ends_by_its_deadline(etcd_server: EtcdServer) -> None:
    calls = {
        "read": lambda store: store.read("/a"),
        "read_prefix": lambda store: store.read_prefix("/a"),
        "put": lambda store: store.put("/a", b""),
        "delete": lambda store: store.delete("/a"),
        "transact": lambda store: store.transact([], [Put("/a", b"")]),
        "grant": lambda store: store.grant(2),
        "revoke": lambda store: store.revoke(7),
    }
    with contextlib.closing(EtcdStore(etcd_server.endpoint, timeout_s=0.3)) as store, frozen(etcd_server.pid):
        for name, call in calls.items():
            started = time.monotonic()
            with pytest.raises(StoreUnavailable, match="no answer"):
                call(store)
            assert time.monotonic() - started < 1.0, name


@pytest.mark.case("R18")
@pytest.mark.slow
def test_a_renewed_lease_outlives_a_freeze_shorter_than_its_ttl(
    etcd_server: EtcdServer, client: EtcdStore
) -> None:
    lease = client.grant(10)
    client.put("/a", b"", lease)
    keeper = client.keep_alive(lease, 1.5)  # asks every half second, so misses are certain
    with frozen(etcd_server.pid):
        assert keeper.wait_lost(timeout_s=2.6) is False
        before = keeper.last_renewed
    assert keeper.wait_lost(timeout_s=1.5) is False
    assert keeper.last_renewed > before + 2.0
    assert client.read("/a") is not None


@pytest.mark.slow
def test_after_a_freeze_longer_than_the_ttl_the_keeper_says_what_the_store_says(
    etcd_server: EtcdServer, client: EtcdStore
) -> None:
    lease = client.grant(1)
    client.put("/a", b"", lease)
    keeper = client.keep_alive(lease, 1)
    with frozen(etcd_server.pid):
        assert keeper.wait_lost(timeout_s=4) is False
    # a renewal that waited at the door may come before or after the expiry: etcd's word is what counts
    assert keeper.wait_lost(timeout_s=3) is (client.read("/a") is None)


@pytest.mark.slow
def test_a_watch_notices_a_connection_that_went_silent(etcd_server: EtcdServer) -> None:
    with (
        SilenceableProxy(etcd_server.endpoint) as proxy,
        contextlib.closing(EtcdStore(proxy.endpoint)) as through,
        contextlib.closing(EtcdStore(etcd_server.endpoint)) as direct,
        Collector(through.watch(["/a"])) as events,
    ):
        events.next()
        proxy.silence()
        direct.put("/a", b"unseen")
        restarted = events.next(timeout=20)
    assert isinstance(restarted, WatchRestarted)
    assert [entry.value for entry in restarted.snapshot.entries] == [b"unseen"]


@pytest.mark.slow
def test_a_lease_outlives_a_connection_that_went_silent(etcd_server: EtcdServer) -> None:
    with (
        SilenceableProxy(etcd_server.endpoint) as proxy,
        contextlib.closing(EtcdStore(proxy.endpoint)) as through,
    ):
        lease = through.grant(5)
        keeper = through.keep_alive(lease, 5)
        assert keeper.wait_lost(timeout_s=0.5) is False
        proxy.silence()
        silent = time.monotonic()
        assert keeper.wait_lost(timeout_s=5.5) is False
        assert keeper.last_renewed > silent + 1.0


class SilenceableProxy:
    """Passes bytes on, until its open connections go silent: neither data nor an end. New ones work."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._silent: set[int] = set()
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> SilenceableProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()

    def silence(self) -> None:
        self._silent.update(id(each) for each in self._sockets)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._sockets += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if id(source) not in self._silent:
                    sink.sendall(data)
            if id(source) not in self._silent:
                sink.shutdown(socket.SHUT_RDWR)


# ---- several endpoints -----------------------------------------------------------------------


def test_a_dead_endpoint_is_passed_over(etcd_server: EtcdServer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as placeholder:
        dead = f"127.0.0.1:{placeholder.getsockname()[1]}"
    with contextlib.closing(EtcdStore(f"{dead},{etcd_server.endpoint}")) as store:
        assert store.put("/a", b"1") > 0  # a write that was certainly not sent is sent to the next one
        with Collector(store.watch(["/a"])) as events:
            assert isinstance(events.next(), WatchRestarted)
        keeper = store.keep_alive(store.grant(2), 2)
        before = time.monotonic()
        assert keeper.wait_lost(1.5) is False
        assert keeper.last_renewed > before


# ---- users -----------------------------------------------------------------------------------


@pytest.fixture
def guarded(etcd_server: EtcdServer) -> EtcdServer:
    """A server with the users root and reader, who may read /open/ only."""
    with grpc.insecure_channel(etcd_server.endpoint) as channel:
        auth = etcdrpc.AuthStub(channel)
        auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name="root"))
        auth.RoleAdd(etcdrpc.AuthRoleAddRequest(name="open"))
        request = etcdrpc.AuthRoleGrantPermissionRequest(name="open")
        request.perm.key, request.perm.range_end = b"/open/", b"/open0"
        auth.RoleGrantPermission(request)
        for user, role in (("root", "root"), ("reader", "open")):
            auth.UserAdd(etcdrpc.AuthUserAddRequest(name=user, password="secret"))
            auth.UserGrantRole(etcdrpc.AuthUserGrantRoleRequest(user=user, role=role))
        auth.AuthEnable(etcdrpc.AuthEnableRequest())
    return etcd_server


def test_a_token_that_the_server_no_longer_takes_is_renewed_unnoticed(guarded: EtcdServer) -> None:
    credentials = Credentials("root", "secret")
    with contextlib.closing(EtcdStore(guarded.endpoint, credentials=credentials)) as store:
        keeper = store.keep_alive(store.grant(2), 2)
        with Collector(store.watch(["/a"])) as events:
            events.next()
            forget_tokens(guarded)
            store.put("/a", b"1")
            assert isinstance(events.next(), KeyWritten)
            forget_tokens(guarded)
            guarded.kill()
            guarded.start()
            back = time.monotonic()
            assert [entry.value for entry in events.next_restart().snapshot.entries] == [b"1"]
        assert keeper.wait_lost(1.5) is False
        assert keeper.last_renewed > back


def forget_tokens(server: EtcdServer) -> None:
    """Switch users off and on again, which ends every token."""
    with grpc.insecure_channel(server.endpoint) as channel:
        auth = etcdrpc.AuthStub(channel)
        token = auth.Authenticate(etcdrpc.AuthenticateRequest(name="root", password="secret")).token
        auth.AuthDisable(etcdrpc.AuthDisableRequest(), metadata=[("token", token)])
        auth.AuthEnable(etcdrpc.AuthEnableRequest())


def test_a_wrong_password_and_a_missing_permission_are_refusals(guarded: EtcdServer) -> None:
    with contextlib.closing(EtcdStore(guarded.endpoint, credentials=Credentials("root", "wrong"))) as store:
        with pytest.raises(
            StoreRefused, match=r"authenticate as 'root'.*invalid user ID or password"
        ) as caught:
            store.read("/a")
        assert "wrong" not in str(caught.value)
    with (
        contextlib.closing(EtcdStore(guarded.endpoint)) as store,
        pytest.raises(StoreRefused, match="user name is empty"),
    ):
        store.read("/a")
    with contextlib.closing(
        EtcdStore(guarded.endpoint, credentials=Credentials("reader", "secret"))
    ) as store:
        assert store.read("/open/a") is None
        with pytest.raises(StoreRefused, match="permission denied"):
            store.read("/a")
        with pytest.raises(StoreRefused, match="permission denied"):
            next(iter(store.watch(["/a"])))


def test_a_password_is_not_sent_in_the_clear_over_a_network() -> None:
    with pytest.raises(RefusedInput, match=r"10\.0\.0\.7:2379: a password needs TLS"):
        EtcdStore("10.0.0.7", credentials=Credentials("root", "secret"))


# ---- size ------------------------------------------------------------------------------------


def test_a_value_over_the_transport_limit_is_a_refusal_too(client: EtcdStore) -> None:
    with pytest.raises(StoreRefused, match=r"put '/a' \(3145728 bytes\)"):
        client.put("/a", bytes(3 << 20))
