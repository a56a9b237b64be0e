"""Coordinating the rounds: one of the agents does it, on a thread beside its training."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Final

import structlog

from elastic_core.clock import Clock
from elastic_core.errors import StoreUnavailable
from elastic_core.ids import NO_REVISION, NodeId, Revision
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Assignment, Generation
from elastic_core.model.node import NodeRecord
from elastic_core.rendezvous.rounds import AwaitAgents, FormRound, RecallRound, RoundPolicy, Rounds, RoundView
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import (
    Condition,
    Created,
    Delete,
    Entry,
    KeyDeleted,
    KeyWritten,
    Modified,
    Operation,
    Put,
    Store,
    WatchEvent,
    WatchRestarted,
)

_LOG: Final = structlog.get_logger(__name__)
_RETRY_S: Final = 0.1
_CHUNK: Final = 100
"""Assignments a transaction; the store takes 128 operations."""


class RoundTerm:
    """One term of the coordinator: watches the agents, decides, writes. Fenced by the leader key."""

    def __init__(
        self, store: Store, keys: RunKeys, *, policy: RoundPolicy, term: Revision, clock: Clock,
        failed: Callable[[Exception], None],
    ) -> None:  # fmt: skip
        """Prepare a term; `failed` is told of an error that is not the store's silence."""
        self._store = store
        self._keys = keys
        self._rounds = Rounds(policy)
        self._leads = Created(keys.leader, term)
        self._clock = clock
        self._failed = failed
        self._events: queue.SimpleQueue[WatchEvent | Exception | None] = queue.SimpleQueue()
        self._watch = store.watch([keys.leader, keys.current, keys.recall, keys.closed], [keys.nodes])
        self._entries: dict[str, Entry] = {}
        self._members: tuple[int, tuple[NodeId, ...]] = (0, ())
        self._reason = ""

    def run(self) -> bool:
        """Coordinate until the leader key is lost, the run is closed, or `stop`; True: it is closed."""
        thread = threading.Thread(target=self._follow, name="round-watch", daemon=True)
        thread.start()
        until: float | None = None
        try:
            while self._take_events(until):
                if self._keys.closed in self._entries:
                    return True
                leader = self._entries.get(self._keys.leader)
                if leader is None or leader.created != self._leads.revision:
                    return False
                until = self._act()
        except Exception as error:  # told to the agent, which raises it: no thread dies unheard
            self._failed(error)
        finally:
            self._watch.close()
            thread.join(timeout=2.0)
        return False

    def stop(self) -> None:
        """End the term, from any thread."""
        self._watch.close()
        self._events.put(None)

    def _follow(self) -> None:
        try:
            for event in self._watch:
                self._events.put(event)
        except Exception as error:  # re-raised by whoever takes it
            self._events.put(error)
        self._events.put(None)

    def _take_events(self, until: float | None) -> bool:
        """Wait for an event or the time, then take all that is there; False: the term is over."""
        try:
            timeout = None if until is None else max(until - self._clock.monotonic(), 0.0)
            event = self._events.get(timeout=timeout)
            while True:
                if event is None:
                    return False
                if isinstance(event, Exception):
                    raise event
                self._take(event)
                event = self._events.get_nowait()
        except queue.Empty:
            return True

    def _take(self, event: WatchEvent) -> None:
        match event:
            case WatchRestarted(snapshot):
                self._entries = {entry.key: entry for entry in snapshot.entries}
            case KeyWritten(entry):
                self._entries[entry.key] = entry
            case KeyDeleted(key):
                self._entries.pop(key, None)

    def _act(self) -> float | None:
        """Decide and write; return when to decide again."""
        now = self._clock.monotonic()
        try:
            decision = self._rounds.decide(self._view(), now)
            if decision.reason != self._reason:
                self._reason = decision.reason
                _LOG.info(
                    "round", run=self._keys.run, decision=type(decision).__name__, reason=decision.reason
                )
            match decision:
                case AwaitAgents(until=until):
                    return until
                case RecallRound():
                    self._recall(decision.number)
                case FormRound():
                    self._form(decision)
        except StoreUnavailable as error:
            _LOG.warning("coordinating: the store does not answer", reason=str(error))
            return now + _RETRY_S
        return None  # what was written comes back as an event

    def _view(self) -> RoundView:
        current = self._current()
        number = current.number if current else 0
        if self._members[0] != number:
            entries = self._store.read_prefix(self._keys.generation(number)).entries
            parts = sorted((decode(Assignment, entry.value) for entry in entries), key=lambda a: a.group_rank)
            self._members = (number, tuple(part.node_id for part in parts))
        nodes = [entry for key, entry in self._entries.items() if key.startswith(self._keys.nodes)]
        nodes.sort(key=lambda entry: entry.created)
        records = tuple(decode(NodeRecord, entry.value) for entry in nodes)
        return RoundView(number=number, members=self._members[1], nodes=records)

    def _current(self) -> Generation | None:
        entry = self._entries.get(self._keys.current)
        return decode(Generation, entry.value) if entry else None

    def _recall(self, number: int) -> None:
        value = str(number).encode()
        entry = self._entries.get(self._keys.recall)
        if entry is None or entry.value != value:
            self._store.transact([self._leads], [Put(self._keys.recall, value)])

    def _form(self, decision: FormRound) -> None:
        """Write the assignments, then flip `current`; both only if nobody else did meanwhile."""
        keys, number = self._keys, decision.number
        entry = self._entries.get(keys.current)
        based_on: list[Condition] = [
            self._leads,
            Modified(keys.current, entry.modified if entry else NO_REVISION),
        ]
        self._store.transact(based_on, [Delete(keys.generation(number), prefix=True)])
        puts: list[Operation] = [
            Put(keys.assignment(number, record.node_id), encode(_assignment(number, rank, record.node_id)))
            for rank, record in enumerate(decision.members)
        ]
        for start in range(0, len(puts), _CHUNK):
            self._store.transact(based_on, puts[start : start + _CHUNK])
        first = decision.members[0]
        generation = Generation(
            number=number,
            cause=decision.cause,
            restart_count=0,
            world_size=len(decision.members),
            group_world_size=len(decision.members),
            master_address=first.address,
            master_port=first.master_port,
            reason=decision.reason,
        )
        old = [Delete(keys.recall)]
        if number > 1:  # all agents that were in it wait: nobody reads it any more
            old += [Delete(keys.generation(number - 1), prefix=True)]
            old += [Delete(keys.round_store(number - 1), prefix=True)]
        self._store.transact(based_on, [Put(keys.current, encode(generation)), *old])


def _assignment(number: int, rank: int, node_id: NodeId) -> Assignment:
    """Return an agent's part; torchrun's agents agree on their workers' ranks by themselves."""
    return Assignment(number=number, node_id=node_id, group_rank=rank, first_rank=rank, slots=1)
