"""What the agent writes to the store: one thread, in order, the newest record only.

The main loop never waits for the store. While the store is away, writes wait and
newer ones replace older; a write of a fenced node is refused by its condition,
and that is told as the end of the lease.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from elastic_core.agent.events import AgentEvent, LeaseEnded, Registered
from elastic_core.agent.lease import NodeLease, Standing, register
from elastic_core.clock import Clock
from elastic_core.errors import StoreError, StoreUnavailable
from elastic_core.ids import NodeId
from elastic_core.model.codec import encode
from elastic_core.model.failure import Failure
from elastic_core.model.node import NodeRecord
from elastic_core.model.progress import Progress
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Operation, Put, Store

_LOG = structlog.get_logger()
_RETRY_S: Final = 0.2
PROGRESS_S: Final = 1.0
"""Progress is written no more often than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Registration:
    record: NodeRecord
    when: Callable[[], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Write:
    """A record, with what must stand in the same transaction."""

    record: NodeRecord
    failure: Failure | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Value:
    """Another key that only a node in good standing may write."""

    key: str
    value: bytes
    node_id: NodeId


_Item = _Registration | _Write | _Value


class Outbox:
    """Writes for one agent."""

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        *,
        ttl_s: float,
        tell: Callable[[AgentEvent], None],
        clock: Clock,
    ) -> None:
        """Begin; `tell` is called from threads and must only enqueue."""
        self._store = store
        self._keys = keys
        self._ttl_s = ttl_s
        self._tell = tell
        self._clock = clock
        self._changed = threading.Condition()
        self._items: deque[_Item] = deque()
        self._progress: _Value | None = None
        self._progress_at = -PROGRESS_S
        self._heard_at = clock.monotonic()
        self._waiting: _Registration | None = None
        self._is_writing = False
        self._closing = False
        self._standing: Standing | None = None
        self._lease: NodeLease | None = None
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    @property
    def standing(self) -> Standing | None:
        """The registration in force, as far as is known here."""
        with self._changed:
            return self._standing

    @property
    def heard_at(self) -> float:
        """Monotonic time at which the store answered last, by what is known here."""
        with self._changed:
            lease = self._lease
            return max(self._heard_at, lease.last_renewed if lease else self._heard_at)

    def register(self, record: NodeRecord, when: Callable[[], bool] = lambda: True) -> None:
        """Register under the record's node id as soon as `when` says so; `Registered` is told then."""
        self._add(_Registration(record=record, when=when))

    def write(self, record: NodeRecord, failure: Failure | None = None) -> None:
        """Write the record, and a failure in the same transaction."""
        self._add(_Write(record=record, failure=failure))

    def put(self, key: str, value: bytes, node_id: NodeId) -> None:
        """Write another key, unless the node is fenced by then."""
        self._add(_Value(key=key, value=value, node_id=node_id))

    def put_progress(self, progress: Progress, node_id: NodeId) -> None:
        """Write progress, the newest once a second."""
        with self._changed:
            self._progress = _Value(key=self._keys.progress, value=encode(progress), node_id=node_id)
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is written; return False if it took too long."""
        with self._changed:
            self._progress_at = -PROGRESS_S
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not self._items and self._progress is None and not self._is_writing, timeout_s
            )

    def close(self, *, revoke: bool) -> None:
        """End the thread and the registration; what is not written is dropped."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout=5.0)
        self._drop_lease(revoke=revoke)

    # ---- the thread --------------------------------------------------------------------------

    def _add(self, item: _Item) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()

    def _run(self) -> None:
        while (item := self._next()) is not None:
            try:
                self._perform(item)
                self._heard_at = self._clock.monotonic()
            except StoreUnavailable as error:
                self._keep(item, error)
            except StoreError as error:
                _LOG.warning("the store refused a write", reason=str(error))
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()

    def _next(self) -> _Item | None:
        with self._changed:
            while not self._closing:
                item = self._pop()
                if item is not None:
                    self._is_writing = True
                    return item
                due = None if self._progress is None else self._progress_at + PROGRESS_S
                self._changed.wait(None if due is None else max(0.0, due - self._clock.monotonic()))
            return None

    def _pop(self) -> _Item | None:
        """Return what is next: in order, progress at its time or before a result, no outdated record."""
        is_due = self._clock.monotonic() >= self._progress_at + PROGRESS_S
        if self._progress is not None and (isinstance(self._items[0], _Value) if self._items else is_due):
            item, self._progress = self._progress, None
            self._progress_at = self._clock.monotonic()
            return item
        while self._items:
            first = self._items.popleft()
            if not self._is_replaced(first):
                return first
        return None

    def _is_replaced(self, item: _Item) -> bool:
        return (
            isinstance(item, _Write)
            and item.failure is None
            and any(
                isinstance(later, _Write) and later.record.node_id == item.record.node_id
                for later in self._items
            )
        )

    def _keep(self, item: _Item, error: StoreUnavailable) -> None:
        _LOG.warning("the store does not answer; the write waits", reason=str(error))
        with self._changed:
            if isinstance(item, _Value) and item.key == self._keys.progress:
                self._progress = self._progress or item
            else:
                self._items.appendleft(item)
            self._changed.wait_for(lambda: self._closing, _RETRY_S)

    def _perform(self, item: _Item) -> None:
        match item:
            case _Registration(record=record, when=when):
                if when():
                    self._register(record)
                else:
                    self._wait_with(item)
            case _Write(record=record, failure=failure):
                standing = self._standing_of(record.node_id)
                if standing is None:
                    return
                record = replace(record, lease=standing.record.lease)
                operations: list[Operation] = [
                    Put(self._keys.node(record.node_id), encode(record), record.lease)
                ]
                if failure is not None:
                    key = self._keys.failure(failure.generation, failure.node_id)
                    operations.append(Put(key, encode(failure)))
                self._transact(standing, operations)
            case _Value(key=key, value=value, node_id=node_id):
                standing = self._standing_of(node_id)
                if standing is not None:
                    self._transact(standing, [Put(key, value)])

    def _wait_with(self, item: _Registration) -> None:
        if self._waiting is not item:
            _LOG.warning("no other node answers this one over UDP: it stays away until one does")
        self._waiting = item
        with self._changed:
            if not any(isinstance(later, _Registration) for later in self._items):
                self._items.appendleft(item)
            self._changed.wait_for(lambda: self._closing, _RETRY_S)

    def _register(self, record: NodeRecord) -> None:
        self._drop_lease(revoke=True)
        standing = register(self._store, self._keys, record, self._ttl_s)
        with self._changed:
            self._standing = standing
        self._tell(Registered(node_id=record.node_id))
        self._lease = NodeLease(self._store, self._keys, standing, ttl_s=self._ttl_s, tell=self._tell)

    def _standing_of(self, node_id: NodeId) -> Standing | None:
        standing = self._standing
        return standing if standing is not None and standing.record.node_id == node_id else None

    def _transact(self, standing: Standing, operations: Sequence[Operation]) -> None:
        result = self._store.transact([standing.condition(self._keys)], operations)
        if not result.succeeded:
            self._tell(LeaseEnded(node_id=standing.record.node_id))

    def _drop_lease(self, *, revoke: bool) -> None:
        """End the registration: no renewal first, then no lease."""
        with self._changed:
            standing, self._standing = self._standing, None
            lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()
        if standing is not None and revoke:
            try:
                self._store.revoke(standing.record.lease)
            except StoreError as error:
                _LOG.warning("the lease could not be revoked and ends by its TTL", reason=str(error))
