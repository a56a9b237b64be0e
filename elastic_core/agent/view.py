"""What the coordinator's keys say: entries of the store to facts of the rendezvous. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.codec import decode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Generation, Stop, Target
from elastic_core.model.node import NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.events import (
    CoordinatorEvent,
    FailureReported,
    NodeGone,
    NodeSeen,
    StopRequested,
    StoreView,
    TargetChanged,
)
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Entry, KeyDeleted, KeyWritten, Snapshot

T = TypeVar("T")
ReadHistory = Callable[[int], HistoryEntry | None]


def watched_keys(keys: RunKeys) -> tuple[list[str], list[str]]:
    """Return the single keys and the prefixes that a coordinator watches."""
    return [keys.leader, keys.current, keys.target, keys.stop, keys.closed], [keys.nodes, keys.failures]


def build_view(snapshot: Snapshot, keys: RunKeys, history: ReadHistory) -> StoreView:
    """Return all that a snapshot of the watched keys says of the run."""
    single = {entry.key: entry for entry in snapshot.entries}
    nodes = [entry for entry in snapshot.entries if entry.key.startswith(keys.nodes)]
    records = [(record, entry.created) for entry in nodes if (record := _try(NodeRecord, entry)) is not None]
    current_entry = single.get(keys.current)
    current = _try(Generation, current_entry) if current_entry else None
    stop = _try(Stop, single[keys.stop]) if keys.stop in single else None
    return StoreView(
        nodes=tuple(record for record, _ in records),
        joined=tuple((record.node_id, created) for record, created in records),
        current=current,
        current_revision=current_entry.modified if current_entry else NO_REVISION,
        history=history(current.number) if current else None,
        failures=_failures(snapshot, keys, current.number if current else 0),
        target=_try(Target, single[keys.target]) if keys.target in single else None,
        stop_reason=stop.reason if stop else None,
        closed=_try(Closed, single[keys.closed]) if keys.closed in single else None,
    )


def event_of(change: KeyWritten | KeyDeleted, keys: RunKeys) -> CoordinatorEvent | None:
    """Return what a change of a watched key means to the coordinator; None: nothing."""
    if isinstance(change, KeyDeleted):
        return _deleted(change.key, keys)
    entry = change.entry
    if entry.key.startswith(keys.nodes):
        record = _try(NodeRecord, entry)
        return NodeSeen(record=record, joined=Revision(entry.created)) if record else None
    if entry.key.startswith(keys.failures):
        failure = _try(Failure, entry)
        return FailureReported(failure=failure) if failure else None
    if entry.key == keys.target:
        return TargetChanged(target=_try(Target, entry))
    if entry.key == keys.stop:
        stop = _try(Stop, entry)
        return StopRequested(reason=stop.reason) if stop else None
    return None


def _deleted(key: str, keys: RunKeys) -> CoordinatorEvent | None:
    if key.startswith(keys.nodes):
        return NodeGone(node_id=NodeId(key.removeprefix(keys.nodes)))
    return TargetChanged(target=None) if key == keys.target else None


def _failures(snapshot: Snapshot, keys: RunKeys, number: int) -> tuple[Failure, ...]:
    prefix = f"{keys.failures}{number:08d}/"
    entries = [entry for entry in snapshot.entries if entry.key.startswith(prefix)]
    entries.sort(key=lambda entry: entry.created)
    return tuple(failure for entry in entries if (failure := _try(Failure, entry)) is not None)


def _try(kind: type[T], entry: Entry) -> T | None:
    """Decode a value; what is no valid one was not written by an agent, and is not there for us."""
    try:
        return decode(kind, entry.value)
    except ValueError:
        return None
