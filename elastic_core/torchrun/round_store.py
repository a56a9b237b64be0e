"""torch's store on ours: what the agents of one round tell each other.

Every round has a prefix of its own, so nothing of an earlier round can be read, and
it outlives the agent of rank 0: the exit barrier needs no peer. Workers have a
store of their own, which their rank 0 opens.
"""

from __future__ import annotations

import datetime
import threading
import uuid
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import tenacity
from torch.distributed import DistStoreError
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined] # exported at run time

from elastic_core.errors import StoreUnavailable
from elastic_core.ids import NO_REVISION
from elastic_core.store.protocol import Entry, KeyWritten, Modified, Put, Store, WatchEvent, WatchRestarted

T = TypeVar("T")

_RETRY_S: Final = 0.1
_MOST_KEYS: Final = 100
"""More than so many keys are awaited by watching the whole round: a store's transaction has its limits."""


class RoundStore(TorchStore):
    """A `torch.distributed.Store` under one prefix. An outage of the store is waited out."""

    def __init__(self, store: Store, prefix: str) -> None:
        super().__init__()
        self._store = store
        self._values = f"{prefix}values/"
        self._additions = f"{prefix}additions/"

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._persist(lambda: self._store.put(self._values + key, _bytes(value)))

    def get(self, key: str) -> bytes:
        """Return a value, waiting for it to be written."""
        return self._await([key], self._patience)[key]

    def add(self, key: str, amount: int) -> int:
        """Add to a number and return the sum; exactly once, also when an answer is lost."""
        mark = self._additions + uuid.uuid4().hex
        return self._persist(lambda: self._add_once(self._values + key, amount, mark))

    def _add_once(self, path: str, amount: int, mark: str) -> int:
        while True:
            applied = self._store.read(mark)  # an attempt before this one, whose answer was lost
            if applied is not None:
                return int(applied.value)
            entry = self._store.read(path)
            total = amount + (int(entry.value) if entry else 0)
            text = str(total).encode()
            unchanged = Modified(path, entry.modified if entry else NO_REVISION)
            if self._store.transact([unchanged], [Put(path, text), Put(mark, text)]).succeeded:
                return total

    def wait(self, keys: Sequence[str], timeout: datetime.timedelta | None = None) -> None:
        """Wait until all keys are written."""
        self._await(keys, timeout or self._patience)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are written."""
        return self._persist(lambda: all(self._store.read(self._values + key) for key in keys))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of several keys, waiting for them to be written."""
        found = self._await(keys, self._patience)
        return [found[key] for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        """Write several keys."""
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value is `expected` (or both are nothing); return the value then."""
        path, wanted, new = self._values + key, _bytes(expected), _bytes(desired)
        entry = self._persist(lambda: self._store.read(path))
        if entry is None and wanted:
            return wanted
        if entry is not None and entry.value != wanted:
            return entry.value
        unchanged = Modified(path, entry.modified if entry else NO_REVISION)
        if self._persist(lambda: self._store.transact([unchanged], [Put(path, new)])).succeeded:
            return new
        return self.get(key)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether there was one."""
        return self._persist(lambda: self._store.delete(self._values + key)) > 0

    def num_keys(self) -> int:
        """Return how many keys there are."""
        return len(self._persist(lambda: self._store.read_prefix(self._values)).entries)

    @property
    def _patience(self) -> datetime.timedelta:
        patience: datetime.timedelta = self.timeout  # type: ignore[attr-defined] # torch's stub lacks it
        return patience

    def _await(self, keys: Sequence[str], timeout: datetime.timedelta) -> dict[str, bytes]:
        missing, found = set(keys), {}
        if not missing:
            return {}
        paths = [self._values + key for key in missing]
        few = len(paths) <= _MOST_KEYS
        watch = self._store.watch(paths, []) if few else self._store.watch([], [self._values])
        timer = threading.Timer(timeout.total_seconds(), watch.close)
        timer.daemon = True
        timer.start()
        try:
            for event in watch:
                for entry in _entries(event):
                    key = entry.key.removeprefix(self._values)
                    if key in missing:
                        found[key] = entry.value
                if len(found) == len(missing):
                    return found
        finally:
            timer.cancel()
            watch.close()
        raise DistStoreError(
            f"no value for {sorted(missing - set(found))[:3]} within {timeout.total_seconds():g} s"
        )

    def _persist(self, act: Callable[[], T]) -> T:
        """Do something that may be repeated until the store answers, for as long as torch's timeout."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_fixed(_RETRY_S),
            stop=tenacity.stop_after_delay(self._patience.total_seconds()),
            reraise=True,
        )
        return retrying(act)


def _entries(event: WatchEvent) -> Sequence[Entry]:
    match event:
        case KeyWritten(entry):
            return [entry]
        case WatchRestarted(snapshot):
            return snapshot.entries
        case _:
            return []


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
