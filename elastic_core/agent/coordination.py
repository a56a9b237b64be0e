"""The coordinator's driver: watches the run, performs what the coordinator decides, fenced.

Everything is written under the condition that this node still holds the leader
key. A write without an answer may have happened: the truth is read again, and the
coordinator goes on from there.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog

from elastic_core.agent.probe import Prober
from elastic_core.agent.view import build_view, event_of, watched_keys
from elastic_core.clock import Clock
from elastic_core.errors import StoreError, StoreUnavailable
from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Assignment
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.coordinator import Coordinator
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    CoordinatorEvent,
    CoordinatorPolicy,
    FenceNode,
    NodeAnswered,
    ProbeNodes,
    PublishGeneration,
    TimeAdvanced,
    Wait,
    WakeAt,
)
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import (
    Created,
    Delete,
    KeyDeleted,
    Modified,
    Operation,
    Put,
    Snapshot,
    Store,
    Watch,
    WatchEvent,
    WatchRestarted,
)

_LOG = structlog.get_logger()
MAX_OPERATIONS: Final = 128
KEPT_GENERATIONS: Final = 2
KEPT_HISTORY: Final = 1_000
REPEAT_S: Final = 10.0
"""A wait that goes on is told again after so long."""
_RETRY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class _Changed:
    """A watch told something; `watch` numbers it, so that what an older one still tells is dropped."""

    watch: int
    event: WatchEvent


class CoordinatorDriver:
    """One term of coordination, from winning the leader key to losing it or the run's end."""

    def __init__(
        self,
        store: Store,
        keys: RunKeys,
        *,
        policy: CoordinatorPolicy,
        leader: Revision,
        clock: Clock,
    ) -> None:
        """Prepare a term that began with the creation of the leader key at revision `leader`."""
        self._store = store
        self._keys = keys
        self._policy = policy
        self._leading = Created(keys.leader, leader)
        self._clock = clock
        self._inbox: queue.SimpleQueue[_Changed | NodeId | None] = queue.SimpleQueue()
        self._watch: Watch | None = None
        self._watch_number = 0
        self._coordinator: Coordinator | None = None
        self._prober = Prober(self._inbox.put)
        self._wake_at: float | None = None
        self._repeat_at = 0.0
        self._clean: int | None = None
        self._is_over = False
        self._ended = threading.Event()

    def stop(self) -> None:
        """End the term: the lease is over, or the agent ends. From any thread."""
        self._ended.set()
        self._inbox.put(None)

    def run(self) -> bool:
        """Coordinate until the term ends; return whether that is because the run is closed."""
        try:
            self._open_watch()
            while not self._ended.is_set():
                self._turn()
            return self._is_over
        finally:
            if self._watch is not None:
                self._watch.close()
            self._prober.close()

    # ---- events ------------------------------------------------------------------------------

    def _turn(self) -> None:
        try:
            item = self._inbox.get(timeout=self._patience())
        except queue.Empty:
            item = None
        now = self._clock.monotonic()
        if isinstance(item, str):
            self._tell(NodeAnswered(node_id=item))
        elif item is not None and item.watch == self._watch_number:
            self._take(item.event)
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self._tell(TimeAdvanced())
        self._repeat(now)

    def _patience(self) -> float:
        due = self._repeat_at if self._wake_at is None else min(self._wake_at, self._repeat_at)
        return max(0.001, due - self._clock.monotonic())

    def _take(self, event: WatchEvent) -> None:
        if isinstance(event, WatchRestarted):
            self._adopt(event.snapshot)
            return
        key = event.key if isinstance(event, KeyDeleted) else event.entry.key
        if key == self._keys.leader:
            self._depose()
        elif key == self._keys.closed:
            self._close()
        elif (fact := event_of(event, self._keys)) is not None:
            self._tell(fact)

    def _adopt(self, snapshot: Snapshot) -> None:
        """Begin, or begin again, from what the store says now."""
        leader = next((entry for entry in snapshot.entries if entry.key == self._keys.leader), None)
        if leader is None or leader.created != self._leading.revision:
            self._depose()
            return
        view = build_view(snapshot, self._keys, self._history)
        now = self._clock.monotonic()
        if self._coordinator is None:
            self._coordinator = Coordinator(self._policy, view, now)
            _LOG.info("coordinating", nodes=len(view.nodes))
            self._tell(TimeAdvanced())
        else:
            self._tell(CommitFailed(view=view))
        if view.closed is not None:
            self._close()

    def _close(self) -> None:
        self._is_over = True
        self._ended.set()

    def _depose(self) -> None:
        _LOG.info("coordinating no more: the leader key is gone")
        self._ended.set()

    def _tell(self, event: CoordinatorEvent) -> None:
        """Give the coordinator a fact, and perform what it decides, until there is nothing more."""
        facts: deque[CoordinatorEvent] = deque([event])
        while facts and self._coordinator is not None and not self._ended.is_set():
            for command in self._coordinator.handle(facts.popleft(), self._clock.monotonic()):
                fact = self._perform(command)
                if fact is not None:
                    facts.append(fact)

    def _repeat(self, now: float) -> None:
        if now < self._repeat_at:
            return
        self._repeat_at = now + REPEAT_S
        coordinator = self._coordinator
        if coordinator is not None and coordinator.situation.is_change_due:
            _LOG.info("still waiting", reason=coordinator.reason)

    # ---- commands ----------------------------------------------------------------------------

    def _perform(self, command: CoordinatorCommand) -> CoordinatorEvent | None:
        match command:
            case PublishGeneration():
                return self._publish(command)
            case CloseRun(closed=closed):
                _LOG.info("closing the run", outcome=closed.outcome, reason=closed.reason)
                put = Put(self._keys.closed, encode(closed))
                self._commit([self._leading, Created(self._keys.closed, NO_REVISION)], [put])
            case ProbeNodes(nodes=nodes):
                known = self._coordinator.situation.nodes if self._coordinator else {}
                self._prober.ask(known[node] for node in nodes if node in known)
            case FenceNode(node_id=node_id, lease=lease, reason=reason):
                _LOG.warning("fencing a node", fenced=node_id, reason=reason)
                try:
                    self._store.revoke(lease)
                except StoreError as error:
                    _LOG.warning("fencing failed, it will be tried again", reason=str(error))
            case WakeAt(at=at):
                self._wake_at = at
            case Wait(reason=reason, facts=facts):
                _LOG.info("decided", reason=reason, **dict(facts))
                self._repeat_at = self._clock.monotonic() + REPEAT_S
        return None

    def _publish(self, command: PublishGeneration) -> CoordinatorEvent | None:
        """Write assignments and then `current`; in one transaction where they fit."""
        number = command.generation.number
        entry = self._in_wall_time(command.entry)
        puts: list[Operation] = [
            Put(self._keys.assignment(number, part.node_id), encode(part))
            for part in with_successors(command.assignments)
        ]
        flip: list[Operation] = [
            Put(self._keys.current, encode(command.generation)),
            Put(self._keys.history_entry(number), encode(entry)),
        ]
        batches = [puts[at : at + MAX_OPERATIONS] for at in range(0, len(puts), MAX_OPERATIONS)]
        if batches and len(batches[-1]) + len(flip) <= MAX_OPERATIONS:
            flip = [*batches.pop(), *flip]
        if self._clean != number:
            batches.insert(0, [Delete(self._keys.generation(number), prefix=True)])
        self._clean = None
        for batch in batches:
            if self._commit([self._leading], batch) is None:
                return None
        based_on = Modified(self._keys.current, command.based_on)
        revision = self._commit([self._leading, based_on], flip)
        if revision is None:
            return None
        generation = command.generation
        _LOG.info(
            "generation published",
            generation=number,
            cause=str(generation.cause),
            reason=generation.reason,
            nodes=generation.group_world_size,
            workers=generation.world_size,
        )
        self._tidy(number)
        return CommitSucceeded(number=number, revision=revision)

    def _commit(
        self, conditions: Sequence[Created | Modified], operations: list[Operation]
    ) -> Revision | None:
        """Write, fenced; None: it was refused or has no known outcome, and the truth is being read."""
        try:
            result = self._store.transact(conditions, operations)
        except StoreError as error:
            _LOG.warning("a write has no outcome, reading again", reason=str(error))
            self._open_watch()
            return None
        if not result.succeeded:
            _LOG.warning("a write was refused by its conditions, reading again")
            self._open_watch()
            return None
        return result.revision

    def _tidy(self, number: int) -> None:
        """Delete what nobody reads any more, and make sure that the next number is unused."""
        deletes: list[Operation] = [Delete(self._keys.generation(number + 1), prefix=True)]
        if number > KEPT_GENERATIONS:
            deletes.append(Delete(self._keys.generation(number - KEPT_GENERATIONS), prefix=True))
        if number > KEPT_HISTORY:
            old = number - KEPT_HISTORY
            deletes += [
                Delete(self._keys.history_entry(old)),
                Delete(self._keys.resumption(old)),
                Delete(f"{self._keys.failures}{old:08d}/", prefix=True),
            ]
        try:
            if self._store.transact([self._leading], deletes).succeeded:
                self._clean = number + 1
        except StoreError as error:
            _LOG.warning("old generations could not be deleted", reason=str(error))

    # ---- parts -------------------------------------------------------------------------------

    def _open_watch(self) -> None:
        """Read everything anew, and follow from there; what older watches still tell is dropped."""
        if self._watch is not None:
            self._watch.close()
        self._watch_number += 1
        self._watch = self._store.watch(*watched_keys(self._keys))
        thread = threading.Thread(
            target=self._follow, args=(self._watch, self._watch_number), name="coordinator-watch", daemon=True
        )
        thread.start()

    def _follow(self, watch: Watch, number: int) -> None:
        for event in watch:
            self._inbox.put(_Changed(number, event))

    def _history(self, number: int) -> HistoryEntry | None:
        while not self._ended.is_set():
            try:
                entry = self._store.read(self._keys.history_entry(number))
                return decode(HistoryEntry, entry.value) if entry else None
            except StoreUnavailable:
                self._ended.wait(_RETRY_S)
        return None

    def _in_wall_time(self, entry: HistoryEntry) -> HistoryEntry:
        offset = self._clock.wall() - self._clock.monotonic()
        return replace(entry, detected_at=entry.detected_at + offset, published_at=self._clock.wall())


def with_successors(assignments: Sequence[Assignment]) -> list[Assignment]:
    """Return the assignments, each with the next one's node as its neighbour in the ring."""
    if len(assignments) < 2:
        return list(assignments)
    following = [*assignments[1:], assignments[0]]
    return [
        replace(part, successor=successor.node_id)
        for part, successor in zip(assignments, following, strict=True)
    ]
