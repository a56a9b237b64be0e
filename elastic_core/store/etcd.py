"""The store on etcd v3: the only module that knows the client library.

It uses the library's generated stubs and adds what no Python client has: a
deadline on every call, a watch that outlives restarts and compactions, renewals
on one stream, a token that is renewed when the server forgot it, and connections
that are back as soon as the server is.

Calls wait for the connection within their deadline, so a restarting server costs
time and no error. Only reads are repeated; a write without an answer raises, for
it may have happened.
"""

from __future__ import annotations

import itertools
import math
import queue
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc
from etcd3 import etcdrpc

from elastic_core.clock import Clock, SystemClock
from elastic_core.errors import StoreError, StoreRefused, StoreUnavailable
from elastic_core.ids import NO_LEASE, LeaseId, Revision
from elastic_core.store.endpoint import DEADLINE_S, Access, Credentials, Endpoint, TlsFiles, parse_endpoints
from elastic_core.store.keeper import LeaseKeeper
from elastic_core.store.protocol import (
    Condition,
    Created,
    Delete,
    Entry,
    KeepAlive,
    KeyDeleted,
    KeyWritten,
    Operation,
    Put,
    Snapshot,
    TxnResult,
    Watch,
    WatchEvent,
    WatchRestarted,
)
from elastic_core.store.watching import ResumingWatch, distinct

_CHANNEL_OPTIONS: Final = (
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1_000),  # despite its name: how long one connection attempt may take
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.keepalive_time_ms", 6_000),  # etcd ends a connection that pings more often than every 5 s
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.ping_timeout_ms", 3_000),  # the one that counts in gRPC 1.85; a minute by default
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # else a new channel shares the dead connection of the old
    ("grpc.enable_http_proxy", 0),  # stores have private addresses
)
_RETRY_PAUSE_S: Final = 0.05

_NO_ANSWER: Final = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
_STALE_TOKEN: Final = ("invalid auth token", "auth store is old", "user name is empty")
_OVERLOADED: Final = "too many requests"
_NOT_SENT: Final = "failed to connect to all addresses"
_NO_LEASE: Final = "lease not found"
_NEEDS_LEADER: Final = ("hasleader", "true")
"""Metadata that ends a stream on a member which lost its cluster, instead of leaving it silent."""


class _Link:
    """A channel to one endpoint with its stubs."""

    def __init__(self, endpoint: Endpoint, tls: TlsFiles | None) -> None:
        self.endpoint = endpoint
        if tls is None:
            self.channel = grpc.insecure_channel(str(endpoint), options=_CHANNEL_OPTIONS)
        else:
            key, cert = (path.read_bytes() if path else None for path in (tls.key, tls.cert))
            credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes(), key, cert)
            self.channel = grpc.secure_channel(str(endpoint), credentials, options=_CHANNEL_OPTIONS)
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.auth = etcdrpc.AuthStub(self.channel)


_Method = Callable[[_Link], Any]
_Started = Callable[[Any], None]


class _Connection:
    """Calls and streams to one of the endpoints; moves on to the next when one does not answer."""

    def __init__(self, access: Access, clock: Clock) -> None:
        self._access = access
        self._clock = clock
        self._lock = threading.Lock()
        self._authenticating = threading.Lock()
        self._links: dict[Endpoint, _Link] = {}
        self._turn = 0
        self._token = ""
        self._closed = threading.Event()

    def call(
        self,
        method: _Method,
        request: Any,
        *,
        what: str,
        repeatable: bool = False,
        started: _Started | None = None,
    ) -> Any:
        """Make one call within the deadline and return the answer.

        `what` says in a few words what it does, for errors; a `repeatable` one may be sent again
        when its answer did not come; `started` gets each attempt's future, to cancel it.
        """
        clock = self._clock
        deadline = clock.monotonic() + self._access.timeout_s
        token_renewed = False
        while True:
            link = self._link()
            try:
                return self._attempt(link, method(link), request, deadline=deadline, started=started)
            except (ValueError, grpc.FutureCancelledError) as error:  # the channel or the call was closed
                raise _closed_error() from error
            except grpc.RpcError as error:
                if self._access.credentials and not token_renewed and _is_stale_token(error):
                    token_renewed, self._token = True, ""
                    continue
                failure = _error_of(error, what=what, endpoint=link.endpoint)
                if isinstance(failure, StoreUnavailable):
                    self.rotate(link, error)
                    again = repeatable or _NOT_SENT in (error.details() or "")
                    left = deadline - clock.monotonic()
                    if again and left > _RETRY_PAUSE_S and not self._closed.wait(_RETRY_PAUSE_S):
                        continue
                raise failure from error

    def _attempt(
        self, link: _Link, method: Any, request: Any, *, deadline: float, started: _Started | None
    ) -> Any:
        options = {
            "metadata": self._token_metadata(link),
            "timeout": max(deadline - self._clock.monotonic(), 0.001),
            "wait_for_ready": len(self._access.endpoints) == 1,
        }
        if started is None:
            return method(request, **options)
        future = method.future(request, **options)
        started(future)
        return future.result()

    def stream(self, method: _Method, requests: Iterator[Any]) -> tuple[_Link, Any]:
        """Open a stream; return it with the link that it uses."""
        link = self._link()
        try:
            return link, method(link)(requests, metadata=(_NEEDS_LEADER, *self._token_metadata(link)))
        except ValueError as error:
            raise _closed_error() from error

    def rotate(self, link: _Link, error: grpc.RpcError) -> None:
        """Use the next endpoint from now on, if `link` is the one in use and we did not end the call."""
        if error.code() is not grpc.StatusCode.CANCELLED:
            with self._lock:
                self._move_on(link)

    def renew(self, link: _Link) -> None:
        """Give up the link's connection: the next use of its endpoint dials anew."""
        with self._lock:
            self._move_on(link)
            if self._links.get(link.endpoint) is link:
                del self._links[link.endpoint]
        link.channel.close()

    def _move_on(self, link: _Link) -> None:
        if self._endpoint() == link.endpoint:
            self._turn += 1

    def close(self) -> None:
        """End all calls and streams."""
        self._closed.set()
        with self._lock:
            links = list(self._links.values())
            self._links.clear()
        for link in links:
            link.channel.close()

    def _endpoint(self) -> Endpoint:
        return self._access.endpoints[self._turn % len(self._access.endpoints)]

    def _link(self) -> _Link:
        with self._lock:
            if self._closed.is_set():
                raise _closed_error()
            endpoint = self._endpoint()
            if endpoint not in self._links:
                self._links[endpoint] = _Link(endpoint, self._access.tls)
            return self._links[endpoint]

    def _token_metadata(self, link: _Link) -> tuple[tuple[str, str], ...]:
        credentials = self._access.credentials
        if credentials is None:
            return ()
        with self._authenticating:
            if not self._token:
                request = etcdrpc.AuthenticateRequest(name=credentials.user, password=credentials.password)
                try:
                    answer = link.auth.Authenticate(
                        request, timeout=self._access.timeout_s, wait_for_ready=True
                    )
                except grpc.RpcError as error:
                    what = f"authenticate as {credentials.user!r}"
                    raise _error_of(error, what=what, endpoint=link.endpoint) from error
                self._token = answer.token
            return (("token", self._token),)


class _EtcdWatchSource:
    """One stream with a watcher for each key and prefix, as `ResumingWatch` wants it."""

    def __init__(self, connection: _Connection, keys: Sequence[str], prefixes: Sequence[str]) -> None:
        self._connection = connection
        self._ranges = [(key.encode(), b"") for key in keys] + [_prefix_range(prefix) for prefix in prefixes]
        self._lock = threading.Lock()
        self._canceled = False
        self._active: Any = None

    def follow(self) -> Iterator[WatchEvent]:
        """Yield all that is watched, then its changes; end when the server cannot go on.

        The watchers are made first and the read comes after, so none of them has a past to catch
        up with, in which etcd would send one watcher's changes before another's older ones.
        """
        requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for key, end in self._ranges:
            create = etcdrpc.WatchCreateRequest(key=key, range_end=end)
            requests.put(etcdrpc.WatchRequest(create_request=create))
        link, call = self._connection.stream(lambda link: link.watch.Watch, iter(requests.get, None))
        try:
            self._adopt(call)
            early = self._await_creation(call, link)
            snapshot = self._read()
            self._adopt(call)
            yield WatchRestarted(snapshot)
            for response in itertools.chain(early, call):
                if response.canceled:  # compacted: this stream fell too far behind
                    return
                yield from (
                    _event(event) for event in response.events if event.kv.mod_revision > snapshot.revision
                )
        except grpc.RpcError as error:
            self._connection.rotate(link, error)
            raise _error_of(error, what="watch", endpoint=link.endpoint) from error
        finally:
            requests.put(None)
            call.cancel()

    def _await_creation(self, call: Any, link: _Link) -> list[Any]:
        """Read until every watcher stands; return the responses with changes that came meanwhile."""
        missing = len(self._ranges)
        early = []
        while missing:
            response = next(call, None)
            if response is None or response.canceled:
                self._read()  # renews a stale token, or raises what really forbids to watch
                reason = response.cancel_reason if response else "the stream ended"
                raise StoreUnavailable(f"etcd at {link.endpoint} made no watch: {reason}")
            missing -= bool(response.created)
            if response.events:
                early.append(response)
        return early

    def _read(self) -> Snapshot:
        reads = [
            etcdrpc.RequestOp(request_range=etcdrpc.RangeRequest(key=key, range_end=end))
            for key, end in self._ranges
        ]
        answer = self._connection.call(
            lambda link: link.kv.Txn,
            etcdrpc.TxnRequest(success=reads),
            what="read what is watched",
            repeatable=True,
            started=self._adopt,
        )
        entries = [_entry(kv) for response in answer.responses for kv in response.response_range.kvs]
        entries.sort(key=lambda entry: entry.key)
        return Snapshot(tuple(entries), Revision(answer.header.revision))

    def cancel(self) -> None:
        """Break what waits, now and from now on."""
        with self._lock:
            self._canceled = True
            active = self._active
        if active is not None:
            active.cancel()

    def _adopt(self, call: Any) -> None:
        with self._lock:
            self._active = call
            canceled = self._canceled
        if canceled:
            call.cancel()


class _EtcdRenewals:
    """The keep-alive stream as the lease keeper wants it."""

    def __init__(self, connection: _Connection, leases: Iterator[LeaseId]) -> None:
        self._connection = connection
        requests = (etcdrpc.LeaseKeepAliveRequest(ID=lease) for lease in leases)
        self._link, self._call = connection.stream(lambda link: link.lease.LeaseKeepAlive, requests)

    def __iter__(self) -> Iterator[tuple[LeaseId, float]]:
        """Yield each answer's lease and TTL."""
        try:
            for answer in self._call:
                yield LeaseId(answer.ID), float(answer.TTL)
        except grpc.RpcError as error:
            self._connection.rotate(self._link, error)
            raise _error_of(error, what="renew leases", endpoint=self._link.endpoint) from error

    def cancel(self) -> None:
        """Break the stream and its connection, which may be half open."""
        self._call.cancel()
        self._connection.renew(self._link)


class EtcdStore:
    """A client of etcd v3. Thread-safe; open it after a fork, never use it over one.

    Renewals have a connection of their own, so that no large answer delays them and
    a half-open one can be replaced without breaking a watch.
    """

    def __init__(
        self,
        endpoints: str,
        *,
        tls: TlsFiles | None = None,
        credentials: Credentials | None = None,
        timeout_s: float = DEADLINE_S,
    ) -> None:
        """Prepare a client of "host:port[,host:port…]"; it connects with its first call.

        Raises:
            RefusedInput: An endpoint is none, or a password would cross a network in the clear.
        """
        access = Access(parse_endpoints(endpoints), tls=tls, credentials=credentials, timeout_s=timeout_s)
        clock = SystemClock()
        self._calls = _Connection(access, clock)
        self._renewals = _Connection(access, clock)
        self._keeper = LeaseKeeper(lambda leases: _EtcdRenewals(self._renewals, leases), clock=clock)
        self._watches: weakref.WeakSet[ResumingWatch] = weakref.WeakSet()

    def read(self, key: str) -> Entry | None:
        """Return one key, or None if it does not exist."""
        request = etcdrpc.RangeRequest(key=key.encode())
        answer = self._calls.call(lambda link: link.kv.Range, request, what=f"read {key!r}", repeatable=True)
        return _entry(answer.kvs[0]) if answer.kvs else None

    def read_prefix(self, prefix: str) -> Snapshot:
        """Return all keys that start with `prefix`, read at one revision."""
        key, end = _prefix_range(prefix)
        request = etcdrpc.RangeRequest(key=key, range_end=end)
        answer = self._calls.call(
            lambda link: link.kv.Range, request, what=f"read {prefix!r}", repeatable=True
        )
        return Snapshot(tuple(map(_entry, answer.kvs)), Revision(answer.header.revision))

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """Write a key; refused if the lease does not exist or the value is too large."""
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
        what = f"put {key!r} ({len(value)} bytes)"
        return Revision(self._calls.call(lambda link: link.kv.Put, request, what=what).header.revision)

    def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key (or all under a prefix) and return how many there were."""
        answer = self._calls.call(
            lambda link: link.kv.DeleteRange, _delete_request(key, prefix=prefix), what=f"delete {key!r}"
        )
        return int(answer.deleted)

    def transact(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        """Apply all operations if all conditions hold, atomically; at most 128 operations."""
        request = etcdrpc.TxnRequest(
            compare=list(map(_compare, conditions)), success=list(map(_request_op, operations))
        )
        what = f"transact {len(operations)} operations ({request.ByteSize()} bytes)"
        answer = self._calls.call(lambda link: link.kv.Txn, request, what=what)
        return TxnResult(bool(answer.succeeded), Revision(answer.header.revision))

    def grant(self, ttl_s: float) -> LeaseId:
        """Make a lease of at least `ttl_s` seconds (etcd: whole seconds, 2 at least)."""
        request = etcdrpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        answer = self._calls.call(lambda link: link.lease.LeaseGrant, request, what=f"grant {ttl_s} s")
        return LeaseId(answer.ID)

    def keep_alive(self, lease: LeaseId, ttl_s: float) -> KeepAlive:
        """Renew a lease in the background, several times a TTL."""
        return self._keeper.keep(lease, ttl_s)

    def revoke(self, lease: LeaseId) -> None:
        """End a lease now, and with it the keys on it; a lease that is gone already is no error."""
        request = etcdrpc.LeaseRevokeRequest(ID=lease)
        try:
            self._calls.call(lambda link: link.lease.LeaseRevoke, request, what=f"revoke {lease:x}")
        except StoreRefused as error:
            if _NO_LEASE not in str(error):
                raise

    def watch(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> Watch:
        """Watch some single keys and some prefixes in one stream."""
        single, outer = distinct(keys, prefixes)
        source = _EtcdWatchSource(self._calls, single, outer)
        watch = ResumingWatch(source, name=[*single, *outer][0])
        self._watches.add(watch)
        return watch

    def close(self) -> None:
        """End watches, renewals and connections."""
        for watch in list(self._watches):
            watch.close()
        self._keeper.close()
        self._calls.close()
        self._renewals.close()


def _error_of(error: grpc.RpcError, *, what: str, endpoint: Endpoint) -> StoreError:
    code, details = error.code(), error.details() or ""
    if code in _NO_ANSWER or _OVERLOADED in details:
        return StoreUnavailable(f"etcd at {endpoint}: no answer to {what}: {code.name}: {details}")
    return StoreRefused(f"etcd at {endpoint} refused to {what}: {details or code.name}")


def _closed_error() -> StoreUnavailable:
    return StoreUnavailable("the store was closed on this side")


def _is_stale_token(error: grpc.RpcError) -> bool:
    details = error.details() or ""
    return any(text in details for text in _STALE_TOKEN)


def _prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Return the half-open range of keys that start with `prefix`; the empty prefix is everything."""
    key = prefix.encode()
    stem = key.rstrip(b"\xff")
    return (key or b"\0"), (stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\0")


def _entry(kv: Any) -> Entry:
    return Entry(
        key=kv.key.decode(),
        value=kv.value,
        created=Revision(kv.create_revision),
        modified=Revision(kv.mod_revision),
        lease=LeaseId(kv.lease),
    )


def _event(event: Any) -> WatchEvent:
    if event.type == event.PUT:
        return KeyWritten(_entry(event.kv))
    return KeyDeleted(event.kv.key.decode(), Revision(event.kv.mod_revision))


def _compare(condition: Condition) -> Any:
    key, equal = condition.key.encode(), etcdrpc.Compare.EQUAL
    if isinstance(condition, Created):
        target, revision = etcdrpc.Compare.CREATE, {"create_revision": condition.revision}
    else:
        target, revision = etcdrpc.Compare.MOD, {"mod_revision": condition.revision}
    return etcdrpc.Compare(key=key, result=equal, target=target, **revision)


def _request_op(operation: Operation) -> Any:
    match operation:
        case Put(key, value, lease):
            put = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease)
            return etcdrpc.RequestOp(request_put=put)
        case Delete(key, prefix):
            return etcdrpc.RequestOp(request_delete_range=_delete_request(key, prefix=prefix))


def _delete_request(key: str, *, prefix: bool) -> Any:
    start, end = _prefix_range(key) if prefix else (key.encode(), b"")
    return etcdrpc.DeleteRangeRequest(key=start, range_end=end)
