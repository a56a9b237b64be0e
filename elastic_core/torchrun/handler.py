"""torchrun's rendezvous handler on etcd v3.

An agent's record lives on its lease; whoever holds the leader key forms the rounds.
Each round has a store and a port of its own, so nothing of an earlier round can be
read (sharing the agents' store over rounds is what breaks restarts in torch's own
handler), and an agent that is dropped learns it and restarts its workers.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, TypeVar

import structlog
import tenacity
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_core.agent.address import PortReservation
from elastic_core.agent.leadership import Leadership
from elastic_core.clock import Clock, SystemClock
from elastic_core.errors import StoreError, StoreUnavailable
from elastic_core.exits import ExitCode
from elastic_core.ids import NO_REVISION, Revision
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Assignment, Closed, Generation, Outcome
from elastic_core.rendezvous.rounds import RoundPolicy
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Created, Put, Store
from elastic_core.torchrun.coordination import RoundTerm
from elastic_core.torchrun.membership import Membership, RunState, new_record
from elastic_core.torchrun.round_store import RoundStore

T = TypeVar("T")

BACKEND: Final = "etcd3"
_LOG: Final = structlog.get_logger(__name__)
_RETRY_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class HandlerSettings:
    """How an agent takes part.

    Attributes:
        run_id: torch's name of the run, as it was given.
        instance: First part of this agent's node ids.
        address: Where the other nodes reach this one.
        ttl_s: TTL of the agent's lease: how long a dead node is waited for.
        join_timeout_s: How long a round may take to be formed.
        closed_ttl_s: How long a closed run is remembered; then its name is free again.
    """

    run_id: str
    instance: str
    address: str
    policy: RoundPolicy
    ttl_s: float
    join_timeout_s: float
    closed_ttl_s: float


class Etcd3RendezvousHandler(RendezvousHandler):
    """One agent's rendezvous; its methods are called by torchrun from one thread."""

    def __init__(
        self, store: Store, keys: RunKeys, settings: HandlerSettings, clock: Clock | None = None
    ) -> None:
        """Prepare; nothing is written before the first `next_rendezvous`."""
        self._store = store
        self._keys = keys
        self._settings = settings
        self._clock = clock or SystemClock()
        self._member: Membership | None = None
        self._port: PortReservation | None = None
        self._round = 0
        self._seen = 0
        self._leadership: Leadership | None = None
        atexit.register(self._leave)  # torchrun does not call `shutdown` when a signal ends it

    # ---- torch's interface -------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return "etcd3"."""
        return BACKEND

    def get_run_id(self) -> str:
        """Return torch's name of the run."""
        return self._settings.run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait until a round with this agent is formed.

        Raises:
            RendezvousClosedError: The run is over.
            RendezvousTimeoutError: No round was formed within the join timeout.
            RendezvousConnectionError: The store gave no answer for so long.
            RendezvousStateError: The store refused, or a thread failed.
        """
        deadline = self._clock.monotonic() + self._settings.join_timeout_s
        try:
            while True:
                member = self._wait_in_line(deadline)
                found = self._await_round(member, deadline)
                if found is not None:
                    return self._enter(*found)
        except StoreUnavailable as error:
            self._leave()
            raise RendezvousConnectionError(str(error)) from error
        except StoreError as error:
            self._leave()
            raise RendezvousStateError(str(error)) from error

    def num_nodes_waiting(self) -> int:
        """Return 1 if this agent's round is over for any reason, else 0; asks nobody."""
        if self._member is None:
            return 0
        state = self._member.state
        self._raise_error(state)
        newer = state.current is not None and state.current.number > self._round
        return int(state.lost or newer or state.recalled >= max(self._round, 1))

    def is_closed(self) -> bool:
        """Return whether the run is over; a store that does not answer has not said so."""
        if self._member is not None and self._member.state.closed is not None:
            return True
        try:
            return self._store.read(self._keys.closed) is not None
        except StoreUnavailable:
            return False

    def set_closed(self) -> None:
        """End the run for all agents."""
        self._close(Outcome.SUCCEEDED, f"closed by {self._settings.instance}")

    def shutdown(self) -> bool:
        """Close the run and leave it; return whether the store took notice."""
        # torchrun calls this in a `finally`: an exception on its way is the only sign of a failed run
        error = sys.exception()
        try:
            if error is None:
                self._close(Outcome.SUCCEEDED, "all workers succeeded")
            elif self._round:  # one who never took part closes nothing
                self._close(Outcome.FAILED, f"{type(error).__name__} on {self._settings.instance}")
            self._leave()
            self._tidy()
            return True
        except StoreError as problem:
            _LOG.warning("the run could not be closed", reason=str(problem))
            return False
        finally:
            self._leave()
            atexit.unregister(self._leave)
            self._store.close()

    # ---- waiting for a round -----------------------------------------------------------------

    def _wait_in_line(self, deadline: float) -> Membership:
        """Say in the store that this agent waits, under a new node id if it was fenced."""
        self._release_port()
        self._port = PortReservation()
        port = self._port.port
        member = self._member
        if member is not None and not member.state.lost:
            back = member.come_back
            if self._persist(lambda: back(round_number=self._round, master_port=port), deadline):
                return member
        if member is not None:
            _LOG.warning("this node's lease ended: it joins anew", node=member.standing.record.node_id)
            self._leave()
        record = new_record(self._settings.instance, self._settings.address)
        record = replace(record, generation=self._round, master_port=port)
        member = self._persist(
            lambda: Membership.begin(self._store, self._keys, record, ttl_s=self._settings.ttl_s), deadline
        )
        self._member = member
        self._leadership = Leadership(self._store, self._keys, make_term=self._make_term(member))
        self._leadership.stand(member.standing)
        return member

    def _make_term(self, member: Membership) -> Callable[[Revision], RoundTerm]:
        return lambda term: RoundTerm(
            self._store,
            self._keys,
            policy=self._settings.policy,
            term=term,
            clock=self._clock,
            failed=member.fail,
        )

    def _await_round(self, member: Membership, deadline: float) -> tuple[Generation, Assignment] | None:
        """Wait for a round with this agent; None: it was fenced and must join anew."""
        self._seen = self._round
        while True:
            with member.changed:
                ready = member.changed.wait_for(
                    lambda: self._is_news(member.state), max(deadline - self._clock.monotonic(), 0.0)
                )
                state = member.state
            if ready:
                self._raise_error(state)
                self._raise_if_closed(state)
                if state.lost:
                    return None
                assert state.current is not None
                self._seen = state.current.number
                key = self._keys.assignment(self._seen, member.standing.record.node_id)
                entry = self._persist(lambda key=key: self._store.read(key), deadline)  # type: ignore[misc]
                if entry is not None:
                    return state.current, decode(Assignment, entry.value)
            elif self._is_full(state):
                deadline = self._clock.monotonic() + self._settings.join_timeout_s  # a spare waits on
            else:
                self._time_out()

    def _is_news(self, state: RunState) -> bool:
        newer = state.current is not None and state.current.number > self._seen
        return newer or state.lost or state.closed is not None or state.error is not None

    def _is_full(self, state: RunState) -> bool:
        current = state.current
        return current is not None and current.group_world_size >= self._settings.policy.max_nodes

    def _time_out(self) -> None:
        nodes = len(self._store.read_prefix(self._keys.nodes).entries)
        self._leave()
        raise RendezvousTimeoutError(
            f"run {self._settings.run_id!r}: no round within {self._settings.join_timeout_s:g} s; "
            f"{nodes} nodes are there, at least {self._settings.policy.min_nodes} are needed: check that all "
            "nodes use the same --rdzv-id and --rdzv-endpoint, or raise join_timeout in --rdzv-conf"
        )

    def _enter(self, generation: Generation, assignment: Assignment) -> RendezvousInfo:
        self._round = generation.number
        self._release_port()  # the worker of rank 0 opens it in a moment
        return RendezvousInfo(
            RoundStore(self._store, self._keys.round_store(generation.number)),
            assignment.group_rank,
            generation.group_world_size,
            RendezvousStoreInfo(generation.master_address, generation.master_port),
        )

    def _raise_error(self, state: RunState) -> None:
        if state.error is not None:
            raise RendezvousStateError(f"run {self._settings.run_id!r}: {state.error}") from state.error

    def _raise_if_closed(self, state: RunState) -> None:
        if state.closed is None:
            return
        text = f"run {self._settings.run_id!r} is over: {state.closed.outcome.value}, {state.closed.reason}"
        raise RendezvousClosedError(f"{text}; to run it again, give another --rdzv-id")

    # ---- ending ------------------------------------------------------------------------------

    def _close(self, outcome: Outcome, reason: str) -> None:
        code = ExitCode.OK if outcome is Outcome.SUCCEEDED else ExitCode.FAILED
        closed = Closed(outcome=outcome, exit_code=code, reason=reason)
        lease = self._store.grant(self._settings.closed_ttl_s)
        put = Put(self._keys.closed, encode(closed), lease)
        if not self._store.transact([Created(self._keys.closed, NO_REVISION)], [put]).succeeded:
            self._store.revoke(lease)

    def _leave(self) -> None:
        self._release_port()
        leadership, self._leadership = self._leadership, None
        if leadership is not None:
            leadership.close()
        member, self._member = self._member, None
        if member is not None:
            member.leave()

    def _tidy(self) -> None:
        """Delete what only agents of the run read, if this was the last one."""
        if not self._store.read_prefix(self._keys.nodes).entries:
            for prefix in (self._keys.generations, self._keys.rounds):
                self._store.delete(prefix, prefix=True)
            for key in (self._keys.current, self._keys.recall):
                self._store.delete(key)

    def _release_port(self) -> None:
        port, self._port = self._port, None
        if port is not None:
            port.release()

    def _persist(self, act: Callable[[], T], deadline: float) -> T:
        """Do something that may be repeated until the store answers or the time is over."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception_type(StoreUnavailable),
            wait=tenacity.wait_fixed(_RETRY_S),
            stop=tenacity.stop_after_delay(max(deadline - self._clock.monotonic(), 0.0)),
            reraise=True,
        )
        return retrying(act)
