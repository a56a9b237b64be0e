"""A store in memory that passes the contract suite of etcd's, with time and faults in a test's hand.

One `MemoryServer` is the store; each `MemoryStore` is one client of it, as each agent
has one. A test arranges what goes wrong: `MemoryStore.faults` for single calls,
`MemoryStore.renewing` for a frozen agent, and the server's `go_away`, `come_back`
and `drop_watches`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from elastic_core.clock import Clock, SystemClock
from elastic_core.errors import StoreError, StoreRefused, StoreUnavailable
from elastic_core.ids import NO_LEASE, NO_REVISION, LeaseId, Revision
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
from elastic_core.testing.clock import ManualClock

T = TypeVar("T")

MAX_BYTES: Final = 1_572_864
MAX_OPERATIONS: Final = 128
_LONGEST_DELAY_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with the first call that it fits.

    Attributes:
        call: Name of the method ("put", "transact", …), "" for any.
        key: What the call's first key starts with.
        until: The call waits for this event before it is applied: a late answer.
        error: What the call raises, None for a call that is only late.
        applied: Whether the call has its effect all the same: failed, yet applied.
    """

    call: str = ""
    key: str = ""
    until: threading.Event | None = None
    error: StoreError | None = None
    applied: bool = False


NO_ANSWER: Final = Fault(error=StoreUnavailable("arranged: no answer"))
NO_ANSWER_YET_APPLIED: Final = Fault(error=StoreUnavailable("arranged: no answer, yet applied"), applied=True)


@dataclass(slots=True)
class _Lease:
    ttl_s: float
    expires: float
    keys: set[str] = field(default_factory=set)
    keepers: list[_MemoryKeepAlive] = field(default_factory=list)

    @property
    def is_renewed(self) -> bool:
        return any(keeper.is_renewing for keeper in self.keepers)


class MemoryServer:
    """Keys, revisions, leases and watches: what all clients share."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or SystemClock()
        self.changed = threading.Condition(threading.RLock())
        self.away = False
        self._revision = Revision(1)
        self._entries: dict[str, Entry] = {}
        self._leases: dict[LeaseId, _Lease] = {}
        self._next_lease = 1
        self._watches: list[_MemoryWatch] = []
        if isinstance(self.clock, ManualClock):
            self.clock.subscribe(self.expire)

    # ---- what a test arranges ----------------------------------------------------------------

    def go_away(self) -> None:
        """Answer nothing any more; leases stand still, as with a server that was stopped."""
        with self.changed:
            self.expire()
            self.away = True

    def come_back(self) -> None:
        """Answer again, with every lease renewed (as etcd does) and every watch restarted."""
        with self.changed:
            self.away = False
            for lease in self._leases.values():
                lease.expires = self.clock.monotonic() + lease.ttl_s
            self.drop_watches()

    def drop_watches(self) -> None:
        """Break every watch: each starts again with a fresh read, and what it had queued is gone."""
        with self.changed:
            for watch in self._watches:
                watch.restart()
            self.changed.notify_all()

    # ---- what clients ask --------------------------------------------------------------------

    def expire(self) -> None:
        """Renew what is kept alive and end every lease whose time is over."""
        with self.changed:
            now = self.clock.monotonic()
            if self.away:
                return
            for lease_id, lease in list(self._leases.items()):
                if lease.is_renewed:
                    lease.expires = now + lease.ttl_s
                elif lease.expires <= now:
                    self.end_lease(lease_id)

    def wait_for(self, ready: Callable[[], bool], timeout_s: float | None = None) -> bool:
        """Block until `ready`, or until the (real) time is over; return whether it is ready."""
        limit = None if timeout_s is None else time.monotonic() + timeout_s
        with self.changed:
            while True:
                self.expire()
                if ready():
                    return True
                left = None if limit is None else limit - time.monotonic()
                if left is not None and left <= 0:
                    return False
                waits = [wait for wait in (left, self._next_expiry()) if wait is not None]
                self.changed.wait(min(waits, default=None))

    def _next_expiry(self) -> float | None:
        if self.away:
            return None
        now = self.clock.monotonic()
        waits = [lease.expires - now for lease in self._leases.values() if not lease.is_renewed]
        return max(min(waits), 0.001) if waits else None

    def read(self, key: str) -> Entry | None:
        """Return one entry."""
        return self._entries.get(key)

    def snapshot(self, fits: Callable[[str], bool]) -> Snapshot:
        """Return the entries whose keys fit."""
        chosen = sorted(key for key in self._entries if fits(key))
        return Snapshot(tuple(self._entries[key] for key in chosen), self._revision)

    def apply(
        self, conditions: Sequence[Condition], operations: Sequence[Operation]
    ) -> tuple[TxnResult, int]:
        """Apply a transaction; return its result and how many keys it deleted."""
        self._check(conditions, operations)
        if not all(self._holds(condition) for condition in conditions):
            return TxnResult(False, self._revision), 0
        for operation in operations:  # etcd looks at leases only when it is about to write
            if isinstance(operation, Put) and operation.lease not in (NO_LEASE, *self._leases):
                raise StoreRefused("requested lease not found")
        revision = Revision(self._revision + 1)
        events: list[WatchEvent] = []
        for operation in operations:
            if isinstance(operation, Put):
                events.append(self._put(operation, revision))
            else:
                events += [self._remove(key, revision) for key in self._fitting(operation)]
        self._publish(events, revision)
        return TxnResult(True, self._revision), sum(isinstance(event, KeyDeleted) for event in events)

    def grant(self, ttl_s: float) -> LeaseId:
        """Make a lease."""
        lease = LeaseId(self._next_lease)
        self._next_lease += 1
        self._leases[lease] = _Lease(ttl_s, self.clock.monotonic() + ttl_s)
        self.changed.notify_all()  # who waits may have to wait less long
        return lease

    def end_lease(self, lease_id: LeaseId) -> None:
        """Remove a lease and its keys; nothing happens if there is none."""
        lease = self._leases.pop(lease_id, None)
        if lease is None:
            return
        revision = Revision(self._revision + 1)
        self._publish([self._remove(key, revision) for key in sorted(lease.keys)], revision)
        for keeper in lease.keepers:
            keeper.lost = True
        self.changed.notify_all()

    def time_left(self, lease_id: LeaseId) -> float:
        """Return the seconds that a lease has left, -1 if there is none."""
        lease = self._leases.get(lease_id)
        return lease.expires - self.clock.monotonic() if lease else -1.0

    def attach(self, keeper: _MemoryKeepAlive) -> None:
        """Have a lease kept alive; one that is gone is lost at once."""
        lease = self._leases.get(keeper.lease)
        if lease is None:
            keeper.lost = True
        else:
            lease.keepers.append(keeper)

    def add_watch(self, watch: _MemoryWatch) -> None:
        """Deliver changes to a watch from now on, beginning with all that it watches."""
        with self.changed:
            self._watches.append(watch)
            watch.restart()

    def remove_watch(self, watch: _MemoryWatch) -> None:
        """Deliver no more."""
        with self.changed:
            if watch in self._watches:
                self._watches.remove(watch)

    def _check(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> None:
        if max(len(conditions), len(operations)) > MAX_OPERATIONS:
            raise StoreRefused("too many operations in txn request")
        size = sum(len(operation.value) for operation in operations if isinstance(operation, Put))
        if size > MAX_BYTES:
            raise StoreRefused(f"request is too large ({size} bytes)")
        puts = [operation for operation in operations if isinstance(operation, Put)]
        deletes = [operation for operation in operations if isinstance(operation, Delete)]
        if len({put.key for put in puts}) < len(puts) or any(
            put.key.startswith(delete.key) if delete.prefix else put.key == delete.key
            for put in puts
            for delete in deletes
        ):
            raise StoreRefused("duplicate key given in txn request")

    def _holds(self, condition: Condition) -> bool:
        entry = self._entries.get(condition.key)
        if entry is None:
            return condition.revision == NO_REVISION
        actual = entry.created if isinstance(condition, Created) else entry.modified
        return condition.revision == actual

    def _put(self, put: Put, revision: Revision) -> KeyWritten:
        old = self._entries.get(put.key)
        if old is not None and old.lease in self._leases:
            self._leases[old.lease].keys.discard(put.key)
        if put.lease != NO_LEASE:
            self._leases[put.lease].keys.add(put.key)
        created = old.created if old is not None else revision
        entry = Entry(put.key, put.value, created, revision, put.lease)
        self._entries[put.key] = entry
        return KeyWritten(entry)

    def _fitting(self, delete: Delete) -> list[str]:
        if delete.prefix:
            return sorted(key for key in self._entries if key.startswith(delete.key))
        return [delete.key] if delete.key in self._entries else []

    def _remove(self, key: str, revision: Revision) -> KeyDeleted:
        entry = self._entries.pop(key)
        if entry.lease in self._leases:
            self._leases[entry.lease].keys.discard(key)
        return KeyDeleted(key, revision)

    def _publish(self, events: Sequence[WatchEvent], revision: Revision) -> None:
        if events:
            self._revision = revision
        for watch in self._watches:
            watch.deliver(events)
        self.changed.notify_all()


class _MemoryWatch:
    def __init__(self, server: MemoryServer, keys: Sequence[str], prefixes: Sequence[str]) -> None:
        if not keys and not prefixes:
            raise ValueError("a watch needs a key or a prefix")
        self._server = server
        self._keys = frozenset(keys)
        self._prefixes = tuple(prefixes)
        self._pending: deque[WatchEvent] = deque()
        self._closed = False

    def __iter__(self) -> Iterator[WatchEvent]:
        self._server.add_watch(self)
        try:
            while (event := self._take()) is not None:
                yield event
        finally:
            self._server.remove_watch(self)

    def close(self) -> None:
        with self._server.changed:
            self._closed = True
            self._server.changed.notify_all()

    def restart(self) -> None:
        self._pending.clear()
        self._pending.append(WatchRestarted(self._server.snapshot(self._fits)))

    def deliver(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            match event:
                case KeyWritten(entry) if self._fits(entry.key):
                    self._pending.append(event)
                case KeyDeleted(key) if self._fits(key):
                    self._pending.append(event)

    def _take(self) -> WatchEvent | None:
        with self._server.changed:
            self._server.wait_for(lambda: self._closed or self._has_news)
            return None if self._closed else self._pending.popleft()

    @property
    def _has_news(self) -> bool:
        return bool(self._pending) and not self._server.away

    def _fits(self, key: str) -> bool:
        return key in self._keys or key.startswith(self._prefixes)


class _MemoryKeepAlive:
    def __init__(self, store: MemoryStore, lease: LeaseId) -> None:
        self.lease = lease
        self.lost = False
        self._store = store
        self._server = store.server
        self._closed = False
        self._renewed = self._server.clock.monotonic()

    @property
    def is_renewing(self) -> bool:
        return not self._closed and self._store.renewing

    @property
    def last_renewed(self) -> float:
        with self._server.changed:
            if self.is_renewing and not self.lost and not self._server.away:
                self._renewed = self._server.clock.monotonic()
            return self._renewed

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        self._server.wait_for(lambda: self._closed or self._is_told, timeout_s)
        return self._is_told

    def close(self) -> None:
        with self._server.changed:
            self._renewed = self.last_renewed
            self._closed = True
            self._server.changed.notify_all()

    @property
    def _is_told(self) -> bool:
        """Whether the loss has reached this client: a frozen one hears nothing."""
        return self.lost and self._store.renewing and not self._server.away


class MemoryStore:
    """One client of a `MemoryServer`; a `Store`.

    Attributes:
        server: What it is a client of.
        faults: What goes wrong with later calls; each is used up by the first call that it fits.
        calls: Name and first key of every call so far, for a test's assertions.
    """

    def __init__(self, server: MemoryServer | None = None) -> None:
        self.server = server or MemoryServer()
        self.faults: list[Fault] = []
        self.calls: list[tuple[str, str]] = []
        self._renewing = True
        self._closed = False
        self._open: list[_MemoryWatch | _MemoryKeepAlive] = []

    @property
    def renewing(self) -> bool:
        """Whether this client renews its leases and hears of their loss; False is a frozen agent."""
        return self._renewing

    @renewing.setter
    def renewing(self, value: bool) -> None:
        with self.server.changed:
            self.server.expire()
            self._renewing = value
            self.server.changed.notify_all()

    def read(self, key: str) -> Entry | None:
        """Return one key, or None if it does not exist."""
        return self._call("read", key, lambda: self.server.read(key))

    def read_prefix(self, prefix: str) -> Snapshot:
        """Return all keys that start with `prefix`, read at one revision."""
        return self._call(
            "read_prefix", prefix, lambda: self.server.snapshot(lambda key: key.startswith(prefix))
        )

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """Write a key; refused if the lease does not exist or the value is too large."""
        return self._call("put", key, lambda: self.server.apply([], [Put(key, value, lease)])[0].revision)

    def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key (or all under a prefix) and return how many there were."""
        return self._call("delete", key, lambda: self.server.apply([], [Delete(key, prefix)])[1])

    def transact(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        """Apply all operations if all conditions hold, atomically; at most 128 operations."""
        first = operations[0].key if operations else ""
        return self._call("transact", first, lambda: self.server.apply(conditions, operations)[0])

    def grant(self, ttl_s: float) -> LeaseId:
        """Make a lease of `ttl_s` seconds."""
        return self._call("grant", "", lambda: self.server.grant(ttl_s))

    def keep_alive(self, lease: LeaseId, ttl_s: float) -> KeepAlive:  # noqa: ARG002 - the lease knows
        """Renew a lease until closed."""
        keeper = _MemoryKeepAlive(self, lease)
        with self.server.changed:
            self.server.expire()
            self.server.attach(keeper)
            self._open.append(keeper)
        return keeper

    def revoke(self, lease: LeaseId) -> None:
        """End a lease now, and with it the keys on it; a lease that is gone already is no error."""
        self._call("revoke", "", lambda: self.server.end_lease(lease))

    def remaining(self, lease: LeaseId) -> float:
        """Return the seconds that a lease has left unless it is renewed; negative: it is over, or unknown."""
        return self._call("remaining", "", lambda: self.server.time_left(lease))

    def watch(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> Watch:
        """Watch some single keys and some prefixes in one stream."""
        watch = _MemoryWatch(self.server, keys, prefixes)
        self._open.append(watch)
        return watch

    def close(self) -> None:
        """End watches and renewals; later calls raise."""
        self._closed = True
        for item in self._open:
            item.close()

    def _call(self, name: str, key: str, act: Callable[[], T]) -> T:
        fault = self._take_fault(name, key)
        if fault.until is not None and not fault.until.wait(_LONGEST_DELAY_S):
            raise AssertionError(f"the late answer to {name} {key!r} was never released")
        with self.server.changed:
            self.server.expire()
            self.calls.append((name, key))
            if self._closed:
                raise StoreUnavailable("the store was closed on this side")
            if self.server.away:
                raise StoreUnavailable(f"arranged: the store is away, {name} {key!r}")
            answer = act() if fault.error is None or fault.applied else None
            if fault.error is not None:
                raise type(fault.error)(*fault.error.args)  # a fresh one: the fault may be arranged twice
            return cast(T, answer)

    def _take_fault(self, name: str, key: str) -> Fault:
        with self.server.changed:
            for index, fault in enumerate(self.faults):
                if fault.call in ("", name) and key.startswith(fault.key):
                    return self.faults.pop(index)
        return Fault()
