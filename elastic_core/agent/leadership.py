"""Leadership: one of the registered agents coordinates, the others wait for its key to go.

The leader key lives on the node's own lease. Whatever fences the node ends its
term in the same moment, so a frozen coordinator holds up nobody longer than any
other frozen node.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from elastic_core.agent.lease import Standing
from elastic_core.errors import StoreError, StoreUnavailable
from elastic_core.ids import NO_REVISION, Revision
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import (
    Created,
    Entry,
    KeyDeleted,
    KeyWritten,
    Put,
    Store,
    Watch,
    WatchEvent,
    WatchRestarted,
)

_LOG = structlog.get_logger()
_RETRY_S: Final = 0.1
_REFUSED_S: Final = 1.0
"""Until the store is asked again what it refused: the lease may be gone, or a right may be missing."""


class Term(Protocol):
    """What the winner does."""

    def run(self) -> bool:
        """Coordinate until the leader key is lost, the run is closed, or `stop`; True: it is closed."""
        ...

    def stop(self) -> None:
        """End the term, from any thread."""
        ...


class Leadership:
    """Campaigns whenever this node is registered, and serves its terms, on a thread of its own."""

    def __init__(self, store: Store, keys: RunKeys, *, make_term: Callable[[Revision], Term]) -> None:
        """Begin; `make_term` is called with the creation revision of each leader key that is won."""
        self._store = store
        self._keys = keys
        self._make_term = make_term
        self._changed = threading.Condition()
        self._standing: Standing | None = None
        self._watch: Watch | None = None
        self._term: Term | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="leadership", daemon=True)
        self._thread.start()

    def stand(self, standing: Standing) -> None:
        """Campaign under this registration."""
        self._change(standing)

    def resign(self) -> None:
        """Campaign and coordinate no more: the lease is over."""
        self._change(None)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closing = True
        self._change(None)
        self._thread.join(timeout=5.0)

    def _change(self, standing: Standing | None) -> None:
        with self._changed:
            self._standing = standing
            watch, term = self._watch, self._term
            self._changed.notify_all()
        if watch is not None:
            watch.close()
        if term is not None:
            term.stop()

    def _is_current(self, standing: Standing) -> bool:
        with self._changed:
            return self._standing is standing

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._standing is not None)
                standing = self._standing
                if self._closing:
                    return
            assert standing is not None
            try:
                won = self._campaign(standing)
                if won is not None:
                    self._serve(standing, won)
            except StoreError as error:
                _LOG.warning("the store refused to let this node coordinate", reason=str(error))
                self._pause(standing)

    def _pause(self, standing: Standing) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._standing is not standing, _REFUSED_S)

    def _serve(self, standing: Standing, won: Revision) -> None:
        term = self._make_term(won)
        with self._changed:
            if self._standing is not standing:
                term.stop()
            self._term = term
        try:
            is_over = term.run()
        finally:
            with self._changed:
                self._term = None
        with self._changed:
            if is_over and self._standing is standing:
                self._standing = None

    def _campaign(self, standing: Standing) -> Revision | None:
        """Wait until the leader key can be had, and return its creation revision; None: stand down."""
        with self._changed:
            if self._standing is not standing:
                return None
            watch = self._watch = self._store.watch([self._keys.leader])
        try:
            for event in watch:
                won = self._try(standing, event)
                if won is not None:
                    return won
            return None
        finally:
            watch.close()
            with self._changed:
                self._watch = None

    def _try(self, standing: Standing, event: WatchEvent) -> Revision | None:
        match event:
            case WatchRestarted(snapshot=snapshot) if snapshot.entries:
                return self._if_own(standing, snapshot.entries[0])
            case KeyWritten(entry=entry):
                return self._if_own(standing, entry)
            case WatchRestarted() | KeyDeleted():
                return self._take(standing)

    def _take(self, standing: Standing) -> Revision | None:
        """Write the leader key, unless somebody else did."""
        free = Created(self._keys.leader, NO_REVISION)
        put = Put(self._keys.leader, standing.record.node_id.encode(), standing.record.lease)
        while self._is_current(standing):
            try:
                result = self._store.transact([free, standing.condition(self._keys)], [put])
                if result.succeeded:
                    return result.revision
                entry = self._store.read(self._keys.leader)
                return self._if_own(standing, entry) if entry is not None else None
            except StoreUnavailable as error:
                _LOG.warning("campaigning: the store does not answer", reason=str(error))
                with self._changed:
                    self._changed.wait_for(lambda: self._standing is not standing, _RETRY_S)
        return None

    def _if_own(self, standing: Standing, entry: Entry) -> Revision | None:
        """Return the revision of a key of ours, whose writing went unanswered."""
        return entry.created if entry.lease == standing.record.lease else None
