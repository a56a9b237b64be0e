"""The store on etcd v3: with `etcd_connection` the only module that knows the client library.

They use the library's generated stubs and add what no Python client has: a
deadline on every call, a watch that outlives restarts and compactions, renewals
on one stream, a token that is renewed when the server forgot it, and connections
that are back as soon as the server, or another member of its cluster, is.
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

from elastic_core.clock import SystemClock
from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.ids import NO_LEASE, LeaseId, Revision
from elastic_core.store.endpoint import DEADLINE_S, Access, Credentials, Endpoint, TlsFiles, parse_endpoints
from elastic_core.store.etcd_connection import Connection, Link, error_of
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

_NO_LEASE: Final = "lease not found"


class _EtcdWatchSource:
    """One stream with a watcher for each key and prefix, as `ResumingWatch` wants it."""

    def __init__(self, connection: Connection, keys: Sequence[str], prefixes: Sequence[str]) -> None:
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
            raise error_of(error, what="watch", endpoint=link.endpoint) from error
        finally:
            requests.put(None)
            call.cancel()

    def _await_creation(self, call: Any, link: Link) -> list[Any]:
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

    def __init__(
        self, connection: Connection, leases: Iterator[LeaseId], silent: Callable[[Endpoint], None]
    ) -> None:
        self._connection = connection
        self._silent = silent
        requests = (etcdrpc.LeaseKeepAliveRequest(ID=lease) for lease in leases)
        self._link, self._call = connection.stream(lambda link: link.lease.LeaseKeepAlive, requests)

    def __iter__(self) -> Iterator[tuple[LeaseId, float]]:
        """Yield each answer's lease and TTL."""
        try:
            for answer in self._call:
                yield LeaseId(answer.ID), float(answer.TTL)
        except grpc.RpcError as error:
            self._connection.rotate(self._link, error)
            raise error_of(error, what="renew leases", endpoint=self._link.endpoint) from error

    def cancel(self) -> None:
        """End the stream."""
        self._call.cancel()

    def abandon(self) -> None:
        """Break the stream and its connection, which may be half open, and tell which member is silent."""
        self._call.cancel()
        self._connection.renew(self._link)
        self._silent(self._link.endpoint)


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
        self._calls = Connection(access, clock)
        self._renewals = Connection(access, clock)
        self._keeper = LeaseKeeper(
            lambda leases: _EtcdRenewals(self._renewals, leases, self._calls.leave), clock=clock
        )
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

    def remaining(self, lease: LeaseId) -> float:
        """Return the seconds that a lease has left unless it is renewed; negative: it is over, or unknown."""
        request = etcdrpc.LeaseTimeToLiveRequest(ID=lease)
        what = f"ask for {lease:x}"
        return float(self._calls.call(lambda link: link.lease.LeaseTimeToLive, request, what=what).TTL)

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
