"""One writer a run: the flow that drives it holds a key on its lease, and every write is fenced by it.

A store that stood still for longer than the lease ends it, though nobody else came: then the run is
taken again. It is lost only to another owner.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from elastic_core.errors import LeaseLost, StoreError
from elastic_core.ids import NO_REVISION, Revision
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Created, Put, Store
from tasks.runs import AlreadyRunning

TTL_S: Final = 5.0
RETRY_S: Final = 0.2


class Ownership:
    """The right to write for a run; a context manager.

    Args:
        owner: Who owns, for the message to others: a flow run's name or a process.
        lost: Called from another thread when somebody else owns the run.
    """

    def __init__(self, store: Store, keys: RunKeys, *, owner: str, lost: Callable[[], None]) -> None:
        self._store = store
        self._keys = keys
        self._owner = f"{owner} on {socket.gethostname()}"
        self._lost = lost
        self._is_lost = False
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        """Take the run; a killed predecessor's lease is waited for.

        Raises:
            AlreadyRunning: A living flow owns it.
        """
        self._lease = self._store.grant(TTL_S)
        try:
            self._created = self._acquire()
        except BaseException:
            self._store.revoke(self._lease)
            raise
        self._renewal = self._store.keep_alive(self._lease, TTL_S)
        self._thread = threading.Thread(target=self._guard, name="ownership", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give the run back."""
        self._closing.set()
        self._renewal.close()
        self._thread.join(timeout=2)
        self._renewal.close()  # the thread may have begun another one meanwhile
        self._store.revoke(self._lease)

    def is_lost(self) -> bool:
        """Return whether somebody else owns the run."""
        return self._is_lost

    def write_new(self, key: str, value: bytes) -> None:
        """Write a key as the owner, unless it exists: whoever wrote it first is not overruled.

        While the run is being taken again nothing is written, and nothing raised: try it again.

        Raises:
            LeaseLost: The run is not ours any more; nothing was written.
        """
        written = self._store.transact([self._created, Created(key, NO_REVISION)], [Put(key, value)])
        if not written.succeeded:
            self._require_ours()

    def write(self, key: str, value: bytes) -> bool:
        """Write a key as the owner; return whether it was written: not while the run is taken again.

        Raises:
            LeaseLost: The run is not ours any more.
        """
        if self._store.transact([self._created], [Put(key, value)]).succeeded:
            return True
        self._require_ours()
        return False

    def _require_ours(self) -> None:
        owner = self._store.read(self._keys.owner)
        if owner is not None and owner.lease != self._lease:
            raise LeaseLost(f"run {self._keys.run} is driven by another flow now")

    def _acquire(self) -> Created:
        key = self._keys.owner
        watch = self._store.watch([key])
        patience = threading.Timer(2 * TTL_S, watch.close)
        patience.start()
        try:
            for _ in watch:  # the first event comes at once, the next ones when the key changes
                taken = self._store.transact(
                    [Created(key, NO_REVISION)], [Put(key, self._owner.encode(), self._lease)]
                )
                if taken.succeeded:
                    return Created(key, taken.revision)
        finally:
            patience.cancel()
            watch.close()
        holder = self._store.read(key)
        raise AlreadyRunning(self._keys.run, holder.value.decode() if holder else "")

    def _guard(self) -> None:
        while self._renewal.wait_lost():
            if not self._take_again():
                self._is_lost = not self._closing.is_set()
                break
        if self._is_lost:
            self._lost()

    def _take_again(self) -> bool:
        """Return whether the run is ours again; asked for as long as the store gives no answer."""
        while not self._closing.is_set():
            try:
                owner = self._store.read(self._keys.owner)
                if owner is not None:  # ours, if only the answer to our last attempt was lost
                    return owner.lease == self._lease and self._renew(owner.created)
                self._lease = self._store.grant(TTL_S)
                free, own = Created(self._keys.owner, NO_REVISION), self._owner.encode()
                taken = self._store.transact([free], [Put(self._keys.owner, own, self._lease)])
                if taken.succeeded:
                    return self._renew(taken.revision)
            except StoreError:
                self._closing.wait(RETRY_S)
        return False

    def _renew(self, created: Revision) -> bool:
        self._created = Created(self._keys.owner, created)
        self._renewal = self._store.keep_alive(self._lease, TTL_S)
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What is known of the run that something belongs to.

    Attributes:
        is_known: Its directory is among the runs here.
        is_driven: A living flow drives it.
        outcome: How it ended, "" while it is unfinished.
        unattended_s: Since when no flow drives it.
    """

    is_known: bool
    is_driven: bool = False
    outcome: str = ""
    unattended_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether nobody owns a thing any more, and why."""

    is_orphan: bool
    reason: str


def judge(claim: Claim, *, abandoned_after_s: float, has_expired: bool, is_foreign: bool) -> Verdict:
    """Say whether anybody still owns what belongs to a run. Pure.

    Nodes of an unfinished run train on without a flow, and the next start adopts them: they are
    orphans only when nobody came for long enough.

    Args:
        claim: What is known of the run.
        abandoned_after_s: Seconds without a flow after which a run counts as given up.
        has_expired: The thing's own time is over.
        is_foreign: Somebody else may own it though its run is not known here.
    """
    if claim.is_driven:
        return Verdict(is_orphan=False, reason="a flow drives its run")
    if has_expired:
        return Verdict(is_orphan=True, reason="its time is over")
    if not claim.is_known:
        if is_foreign:
            return Verdict(is_orphan=False, reason="its run is not known here: another machine's")
        return Verdict(is_orphan=True, reason="its run's directory is gone")
    if claim.outcome:
        return Verdict(is_orphan=True, reason=f"its run ended: {claim.outcome}")
    alone = f"no flow drives its run since {_duration(claim.unattended_s)}"
    if claim.unattended_s >= abandoned_after_s:
        return Verdict(is_orphan=True, reason=alone)
    return Verdict(is_orphan=False, reason=f"{alone}; a start adopts it, kept {_duration(abandoned_after_s)}")


def _duration(seconds: float) -> str:
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= 2 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"
