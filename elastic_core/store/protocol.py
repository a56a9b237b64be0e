"""The store as the library sees it: revisions, transactions, leases and watches.

Nothing of rendezvous is in here. Two implementations pass one contract suite:
`store.etcd.EtcdStore` (etcd v3) and `testing.memory_store.MemoryStore`. Every
call has a deadline; a call that got no answer raises `StoreUnavailable`, and a
write that raised it may have happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from elastic_core.ids import NO_LEASE, LeaseId, Revision


@dataclass(frozen=True, slots=True)
class Entry:
    """A key with its value.

    Attributes:
        created: Store revision at which the key was made; orders keys without clocks.
        modified: Store revision of its last write.
        lease: The lease it lives on, 0 for none.
    """

    key: str
    value: bytes
    created: Revision
    modified: Revision
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Entries read at one revision, sorted by key."""

    entries: tuple[Entry, ...]
    revision: Revision


@dataclass(frozen=True, slots=True)
class Created:
    """Condition: the key exists and was created at this revision (0: it does not exist)."""

    key: str
    revision: Revision


@dataclass(frozen=True, slots=True)
class Modified:
    """Condition: the key's last write was at this revision (0: it does not exist)."""

    key: str
    revision: Revision


Condition = Created | Modified


@dataclass(frozen=True, slots=True)
class Put:
    """Write a key."""

    key: str
    value: bytes
    lease: LeaseId = NO_LEASE


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete a key, or all keys that start with it if `prefix`."""

    key: str
    prefix: bool = False


Operation = Put | Delete


@dataclass(frozen=True, slots=True)
class TxnResult:
    """Whether the conditions held (then all operations were applied, else none)."""

    succeeded: bool
    revision: Revision


@dataclass(frozen=True, slots=True)
class KeyWritten:
    """A watched key got a value."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class KeyDeleted:
    """A watched key is gone (deleted, or its lease ended)."""

    key: str
    revision: Revision


@dataclass(frozen=True, slots=True)
class WatchRestarted:
    """The stream broke or was compacted and stands again, with all matching keys read afresh.

    Replaces everything that the watcher knew: keys that are not in it are gone.
    """

    snapshot: Snapshot


WatchEvent = KeyWritten | KeyDeleted | WatchRestarted


class Watch(Protocol):
    """A stream of changes that outlives restarts and compactions of the server.

    The first event is a `WatchRestarted` with the state at the start, so reading
    first and watching from there is one step without a gap. Changes come in the order
    in which they happened; only where the reader lags behind hundreds of them may those
    of different keys overtake each other, never those of one key.
    """

    def __iter__(self) -> Iterator[WatchEvent]:
        """Yield events until `close`; blocks between them, also while the server is away."""
        ...

    def close(self) -> None:
        """End the stream; an iterator that waits ends within a second."""
        ...


class KeepAlive(Protocol):
    """Renews one lease until closed."""

    def wait_lost(self, timeout_s: float | None = None) -> bool:
        """Block until the store says that the lease is gone; return False on timeout or close.

        A store that does not answer is not a lost lease: only its own word counts.
        """
        ...

    @property
    def last_renewed(self) -> float:
        """Monotonic time of the last confirmed renewal."""
        ...

    def close(self) -> None:
        """Stop renewing; the lease lives on until its TTL ends or it is revoked."""
        ...


class Store(Protocol):
    """A small, consistent key-value store with leases. Thread-safe; not to be used over a fork."""

    def read(self, key: str) -> Entry | None:
        """Return one key, or None if it does not exist."""
        ...

    def read_prefix(self, prefix: str) -> Snapshot:
        """Return all keys that start with `prefix`, read at one revision."""
        ...

    def put(self, key: str, value: bytes, lease: LeaseId = NO_LEASE) -> Revision:
        """Write a key.

        Raises:
            StoreRefused: The lease does not exist, or the value is too large.
        """
        ...

    def delete(self, key: str, *, prefix: bool = False) -> int:
        """Delete a key (or all under a prefix) and return how many there were."""
        ...

    def transact(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        """Apply all operations if all conditions hold, atomically; at most 128 operations."""
        ...

    def grant(self, ttl_s: float) -> LeaseId:
        """Make a lease of at least `ttl_s` seconds (etcd: whole seconds, 2 at least)."""
        ...

    def keep_alive(self, lease: LeaseId, ttl_s: float) -> KeepAlive:
        """Renew a lease in the background, several times a TTL."""
        ...

    def revoke(self, lease: LeaseId) -> None:
        """End a lease now, and with it the keys on it; a lease that is gone already is no error."""
        ...

    def remaining(self, lease: LeaseId) -> float:
        """Return the seconds that a lease has left unless it is renewed; negative: it is over, or unknown."""
        ...

    def watch(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> Watch:
        """Watch some single keys and some prefixes in one stream."""
        ...

    def close(self) -> None:
        """End watches, renewals and connections."""
        ...
