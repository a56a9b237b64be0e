"""What the store and the provider say of a run, as one frozen view.

`RunFold` folds the store's watch events; it is pure. `RunWatch` feeds it from a
thread and wakes the loop that reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from elastic_core.cluster.provider import Instance
from elastic_core.model.codec import decode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Generation, Stop, Target
from elastic_core.model.node import NodeRecord
from elastic_core.model.progress import HistoryEntry, Progress, Resumption, RunResult, SlowWorker
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import (
    Entry,
    KeyDeleted,
    KeyWritten,
    Snapshot,
    Store,
    Watch,
    WatchEvent,
    WatchRestarted,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A run at one moment.

    Attributes:
        history: All generations of this attempt, in their order.
        failures: In the order in which the store got them.
        slow: Workers that found themselves slower than the others, also those that recovered.
        instances: What the provider lists, ended ones too.
    """

    nodes: tuple[NodeRecord, ...] = ()
    current: Generation | None = None
    history: tuple[HistoryEntry, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    failures: tuple[Failure, ...] = ()
    slow: tuple[SlowWorker, ...] = ()
    target: Target | None = None
    stop: Stop | None = None
    progress: Progress | None = None
    result: RunResult | None = None
    closed: Closed | None = None
    instances: tuple[Instance, ...] = ()

    def root_cause(self) -> Failure | None:
        """Return the first failure that no other one explains."""
        return next((failure for failure in self.failures if not failure.consequence), None)


@dataclass
class RunFold:
    """The keys of a run, decoded, kept up to date by watch events."""

    keys: RunKeys
    _entries: dict[str, tuple[Entry, Any]] = field(default_factory=dict)

    def apply(self, event: WatchEvent) -> None:
        """Take one event in; keys that are not known to this version are ignored."""
        match event:
            case WatchRestarted(snapshot=snapshot):
                self.replace(snapshot)
            case KeyWritten(entry=entry):
                self._put(entry)
            case KeyDeleted(key=key):
                self._entries.pop(key, None)

    def replace(self, snapshot: Snapshot) -> None:
        """Take over everything that was read at one revision."""
        self._entries.clear()
        for entry in snapshot.entries:
            self._put(entry)

    def observation(self, instances: Sequence[Instance] = ()) -> Observation:
        """Return the view of now."""
        keys = self.keys
        return Observation(
            nodes=self._all(keys.nodes),
            current=self._one(keys.current),
            history=self._all(keys.history),
            resumptions=self._all(keys.resumptions),
            failures=self._all(keys.failures, by_arrival=True),
            slow=self._all(keys.slow, by_arrival=True),
            target=self._one(keys.target),
            stop=self._one(keys.stop),
            progress=self._one(keys.progress),
            result=self._one(keys.result),
            closed=self._one(keys.closed),
            instances=tuple(instances),
        )

    def _put(self, entry: Entry) -> None:
        kind = self._kind(entry.key)
        if kind is not None:
            self._entries[entry.key] = (entry, decode(kind, entry.value))

    def _kind(self, key: str) -> type[Any] | None:
        keys = self.keys
        single: Mapping[str, type[Any]] = {
            keys.current: Generation,
            keys.target: Target,
            keys.stop: Stop,
            keys.progress: Progress,
            keys.result: RunResult,
            keys.closed: Closed,
        }
        families: Mapping[str, type[Any]] = {
            keys.nodes: NodeRecord,
            keys.history: HistoryEntry,
            keys.resumptions: Resumption,
            keys.failures: Failure,
            keys.slow: SlowWorker,
        }
        if key in single:
            return single[key]
        return next((kind for prefix, kind in families.items() if key.startswith(prefix)), None)

    def _one(self, key: str) -> Any:
        found = self._entries.get(key)
        return found[1] if found else None

    def _all(self, prefix: str, *, by_arrival: bool = False) -> tuple[Any, ...]:
        family = [pair for key, pair in self._entries.items() if key.startswith(prefix)]
        family.sort(key=lambda pair: (pair[0].created if by_arrival else 0, pair[0].key))
        return tuple(value for _, value in family)


def observe(store: Store, keys: RunKeys) -> Observation:
    """Read a run once."""
    fold = RunFold(keys)
    fold.replace(store.read_prefix(keys.prefix))
    return fold.observation()


class RunWatch:
    """Follows a run in a thread; `wait` returns as soon as there is news.

    A context manager. An error of the thread is raised by the next `wait`: it cannot die unseen.
    """

    def __init__(self, store: Store, keys: RunKeys) -> None:
        self._fold = RunFold(keys)
        self._watch: Watch = store.watch([], [keys.prefix])
        self._news = threading.Condition()
        self._has_news = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._follow, name="run-watch", daemon=True)

    def __enter__(self) -> Self:
        """Start following."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the stream and its thread."""
        self._watch.close()
        self._thread.join(timeout=5)

    def wait(self, timeout_s: float) -> bool:
        """Block until something changed or the time is up; return whether something did."""
        with self._news:
            self._news.wait_for(lambda: self._has_news or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            changed, self._has_news = self._has_news, False
            return changed

    def wake(self) -> None:
        """End a `wait` of another thread now."""
        with self._news:
            self._has_news = True
            self._news.notify_all()

    def observation(self, instances: Sequence[Instance] = ()) -> Observation:
        """Return the newest view."""
        with self._news:
            return self._fold.observation(instances)

    def _follow(self) -> None:
        try:
            for event in self._watch:
                with self._news:
                    self._fold.apply(event)
                    self._has_news = True
                    self._news.notify_all()
        except Exception as error:  # whatever it is, the loop that waits can act on it
            with self._news:
                self._error = error
                self._news.notify_all()
