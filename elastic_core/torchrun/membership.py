"""One agent's membership: its record, its lease, and what the store tells it while it waits or runs."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import structlog

from elastic_core.agent.lease import Standing, register
from elastic_core.errors import StoreError
from elastic_core.ids import NO_LEASE, make_node_id
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Closed, Generation
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import KeyDeleted, KeyWritten, Put, Store, WatchEvent, WatchRestarted

_LOG: Final = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class RunState:
    """What an agent knows of the run.

    Attributes:
        recalled: Newest round whose members shall come back.
        error: What ended the watching thread: a bug, or a refusal.
    """

    current: Generation | None = None
    recalled: int = 0
    closed: Closed | None = None
    lost: bool = False
    error: Exception | None = None


class Membership:
    """One incarnation of an agent; a fenced one is lost for ever and a new one takes its place."""

    def __init__(self, store: Store, keys: RunKeys, standing: Standing, *, ttl_s: float) -> None:
        self.standing = standing
        self.changed = threading.Condition()
        self.state = RunState()
        self._store = store
        self._keys = keys
        self._keep = store.keep_alive(standing.record.lease, ttl_s)
        self._watch = store.watch([self._own_key, keys.current, keys.recall, keys.closed])
        self._threads = [
            threading.Thread(target=self._guard, args=(self._await_loss,), name="lease", daemon=True),
            threading.Thread(target=self._guard, args=(self._follow,), name="run-watch", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def begin(cls, store: Store, keys: RunKeys, record: NodeRecord, *, ttl_s: float) -> Membership:
        """Register under a new node id. May be repeated after `StoreUnavailable`."""
        return cls(store, keys, register(store, keys, record, ttl_s), ttl_s=ttl_s)

    def come_back(self, *, round_number: int, master_port: int) -> bool:
        """Say that this agent waits for a round after `round_number`; return False if it was fenced."""
        record = replace(self.standing.record, generation=round_number, master_port=master_port)
        condition = self.standing.condition(self._keys)
        put = Put(self._own_key, encode(record), record.lease)
        return self._store.transact([condition], [put]).succeeded

    def fail(self, error: Exception) -> None:
        """Have the agent raise this."""
        self._change(lambda state: replace(state, error=error))

    def leave(self) -> None:
        """End the lease and with it the record."""
        self.close()
        try:
            self._store.revoke(self.standing.record.lease)
        except StoreError as error:
            _LOG.warning("the lease could not be revoked and ends by its TTL", reason=str(error))

    def close(self) -> None:
        """End the threads; the lease ends by its TTL."""
        self._watch.close()
        self._keep.close()
        for thread in self._threads:
            thread.join(timeout=2.0)

    @property
    def _own_key(self) -> str:
        return self._keys.node(self.standing.record.node_id)

    def _change(self, change: Callable[[RunState], RunState]) -> None:
        with self.changed:
            self.state = change(self.state)
            self.changed.notify_all()

    def _guard(self, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # raised by the agent's next call: no thread dies unheard
            self.fail(error)

    def _await_loss(self) -> None:
        if self._keep.wait_lost():
            self._change(lambda state: replace(state, lost=True))

    def _follow(self) -> None:
        for event in self._watch:
            self._change(lambda state, event=event: self._after(state, event))  # type: ignore[misc]

    def _after(self, state: RunState, event: WatchEvent) -> RunState:
        match event:
            case WatchRestarted(snapshot):
                lost = self._own_key not in [entry.key for entry in snapshot.entries]
                state = RunState(lost=state.lost or lost, error=state.error)
                for entry in snapshot.entries:
                    state = self._after(state, KeyWritten(entry))
            case KeyWritten(entry) if entry.key == self._keys.current:
                return replace(state, current=decode(Generation, entry.value))
            case KeyWritten(entry) if entry.key == self._keys.recall:
                return replace(state, recalled=int(entry.value))
            case KeyWritten(entry) if entry.key == self._keys.closed:
                return replace(state, closed=decode(Closed, entry.value))
            case KeyDeleted(key) if key == self._own_key:
                return replace(state, lost=True)
        return state


def new_record(instance: str, address: str) -> NodeRecord:
    """Return the record of a new incarnation, not registered yet; torchrun's agents answer no probes."""
    return NodeRecord(
        node_id=make_node_id(instance, uuid.uuid4().hex[:12]),
        address=address,
        probe_port=0,
        probe_token="",
        master_port=0,
        slots=1,
        lease=NO_LEASE,
        phase=NodePhase.READY,
    )
