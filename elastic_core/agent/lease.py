"""A node's place in the store: the record, the lease it lives on, and the watch for what concerns it.

One object an incarnation: a fenced node comes back with a new one. Threads of it
only tell; nothing is decided here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from elastic_core.agent.events import (
    AgentEvent,
    DrainRequested,
    GenerationPublished,
    LeaseEnded,
    RunClosed,
    StopRequested,
)
from elastic_core.errors import StoreUnavailable
from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Assignment, Closed, Generation, Stop
from elastic_core.model.node import NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import (
    Created,
    Entry,
    KeepAlive,
    KeyDeleted,
    KeyWritten,
    Put,
    Store,
    Watch,
    WatchEvent,
    WatchRestarted,
)

_RETRY_S: Final = 0.1
Tell = Callable[[AgentEvent], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """A registered node: what its writes are conditioned on."""

    record: NodeRecord
    created: Revision

    def condition(self, keys: RunKeys) -> Created:
        """Return the condition that the node is not fenced."""
        return Created(keys.node(self.record.node_id), self.created)


def register(store: Store, keys: RunKeys, record: NodeRecord, ttl_s: float) -> Standing:
    """Take a lease and write the record on it. May be repeated after `StoreUnavailable`.

    Raises:
        StoreUnavailable: No answer; a lease that was granted nevertheless ends by its TTL.
    """
    key = keys.node(record.node_id)
    record = replace(record, lease=store.grant(ttl_s))
    put = Put(key, encode(record), record.lease)
    result = store.transact([Created(key, NO_REVISION)], [put])
    if result.succeeded:
        return Standing(record=record, created=result.revision)
    # The answer to an earlier attempt got lost: its record is ours, but its lease is renewed by nobody.
    store.delete(key)
    result = store.transact([Created(key, NO_REVISION)], [put])
    if not result.succeeded:
        raise StoreUnavailable(f"the record {key!r} is being written by somebody else")
    return Standing(record=record, created=result.revision)


class NodeLease:
    """Keeps one incarnation registered and tells what the store says to it."""

    def __init__(self, store: Store, keys: RunKeys, standing: Standing, *, ttl_s: float, tell: Tell) -> None:
        """Begin to renew and to watch; events come on threads of this object until `close`."""
        self._store = store
        self._keys = keys
        self._standing = standing
        self._tell = tell
        self._closed = threading.Event()
        self._keep: KeepAlive = store.keep_alive(standing.record.lease, ttl_s)
        node_id = standing.record.node_id
        self._watch: Watch = store.watch(
            [keys.node(node_id), keys.current, keys.closed, keys.stop, keys.drain(node_id)]
        )
        self._threads = [
            threading.Thread(target=self._await_loss, name="lease", daemon=True),
            threading.Thread(target=self._follow, name="run-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @property
    def node_id(self) -> NodeId:
        """Whose lease it is."""
        return self._standing.record.node_id

    @property
    def last_renewed(self) -> float:
        """Monotonic time of the last confirmed renewal."""
        return self._keep.last_renewed

    def close(self) -> None:
        """Stop renewing and watching; the lease lives on until it is revoked or its TTL ends."""
        self._closed.set()
        self._watch.close()
        self._keep.close()
        for thread in self._threads:
            thread.join(timeout=2.0)

    # ---- threads -----------------------------------------------------------------------------

    def _await_loss(self) -> None:
        if self._keep.wait_lost():
            self._say(LeaseEnded(node_id=self.node_id))

    def _follow(self) -> None:
        for event in self._watch:
            if self._closed.is_set():
                return
            self._take(event)

    def _take(self, event: WatchEvent) -> None:
        match event:
            case WatchRestarted(snapshot=snapshot):
                own = self._keys.node(self.node_id)
                if not any(entry.key == own for entry in snapshot.entries):
                    self._say(LeaseEnded(node_id=self.node_id))
                for entry in snapshot.entries:
                    self._read(entry)
            case KeyWritten(entry=entry):
                self._read(entry)
            case KeyDeleted(key=key) if key == self._keys.node(self.node_id):
                self._say(LeaseEnded(node_id=self.node_id))

    def _read(self, entry: Entry) -> None:
        keys = self._keys
        if entry.key == keys.closed:
            self._say(RunClosed(closed=decode(Closed, entry.value)))
        elif entry.key == keys.stop:
            self._say(StopRequested(reason=decode(Stop, entry.value).reason))
        elif entry.key == keys.drain(self.node_id):
            self._say(DrainRequested(reason=entry.value.decode(errors="replace") or "asked by the flow"))
        elif entry.key == keys.current:
            generation = decode(Generation, entry.value)
            found, assignment = self._assignment(generation.number)
            if found:
                self._say(GenerationPublished(generation=generation, assignment=assignment))

    def _assignment(self, number: int) -> tuple[bool, Assignment | None]:
        """Return this node's part; it was written before `current`, so one read tells."""
        while not self._closed.is_set():
            try:
                entry = self._store.read(self._keys.assignment(number, self.node_id))
                return True, decode(Assignment, entry.value) if entry else None
            except StoreUnavailable:
                self._closed.wait(_RETRY_S)
        return False, None

    def _say(self, event: AgentEvent) -> None:
        if not self._closed.is_set():
            self._tell(event)
