"""torchrun's view of the rendezvous, with agents as threads over the store in memory."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousStateError,
    RendezvousTimeoutError,
)

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.ids import NodeId, RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Assignment, Closed, Outcome
from elastic_core.rendezvous.rounds import RoundPolicy
from elastic_core.store.keys import RunKeys
from elastic_core.testing.memory_store import NO_ANSWER, Fault, MemoryServer, MemoryStore
from elastic_core.torchrun.handler import Etcd3RendezvousHandler, HandlerSettings

KEYS = RunKeys(RunId("torchrun-test"))


class Group:
    """Agents of one run."""

    def __init__(self, *, min_nodes: int = 2, max_nodes: int = 3, join_timeout_s: float = 20.0) -> None:
        self.server = MemoryServer()
        self.handlers: list[Etcd3RendezvousHandler] = []
        self.stores: list[MemoryStore] = []
        self._policy = RoundPolicy(min_nodes=min_nodes, max_nodes=max_nodes, last_call=0.2)
        self._join_timeout_s = join_timeout_s
        self._numbers = itertools.count()

    def agent(self, *, join_timeout_s: float = 0.0) -> Etcd3RendezvousHandler:
        store = MemoryStore(self.server)
        settings = HandlerSettings(
            run_id="test",
            instance=f"node-{next(self._numbers)}",
            address="10.0.0.1",
            policy=self._policy,
            ttl_s=5.0,
            join_timeout_s=join_timeout_s or self._join_timeout_s,
            closed_ttl_s=60.0,
        )
        handler = Etcd3RendezvousHandler(store, KEYS, settings)
        self.handlers.append(handler)
        self.stores.append(store)
        return handler

    def round(self, *handlers: Etcd3RendezvousHandler) -> list[RendezvousInfo]:
        """Let these agents come to the next round together."""
        return [future.result(20) for future in [join(handler) for handler in handlers]]

    def close(self) -> None:
        for handler in self.handlers:
            handler._leave()


def join(handler: Etcd3RendezvousHandler) -> Future[RendezvousInfo]:
    return in_thread(handler.next_rendezvous)


def in_thread(act: Callable[[], RendezvousInfo]) -> Future[RendezvousInfo]:
    future: Future[RendezvousInfo] = Future()

    def run() -> None:
        try:
            future.set_result(act())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def await_recall(handler: Etcd3RendezvousHandler) -> None:
    """Wait until torchrun would restart the workers of this agent."""
    member = handler._member
    assert member is not None
    with member.changed:
        assert member.changed.wait_for(lambda: handler.num_nodes_waiting() > 0, 5), "nobody recalled it"


def node_id(handler: Etcd3RendezvousHandler) -> str:
    assert handler._member is not None
    return handler._member.standing.record.node_id


def fence(group: Group, handler: Etcd3RendezvousHandler) -> None:
    """End an agent's lease from outside, as its expiry would."""
    assert handler._member is not None
    group.stores[0].revoke(handler._member.standing.record.lease)


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group()
    yield group
    group.close()


def test_agents_form_a_round_with_distinct_ranks_and_one_address(group: Group) -> None:
    infos = group.round(group.agent(), group.agent(), group.agent())

    assert sorted(info.rank for info in infos) == [0, 1, 2]
    assert [info.world_size for info in infos] == [3, 3, 3]
    addresses = {
        (info.bootstrap_store_info.master_addr, info.bootstrap_store_info.master_port) for info in infos
    }
    assert len(addresses) == 1
    assert [handler.num_nodes_waiting() for handler in group.handlers] == [0, 0, 0]


def test_every_round_has_its_own_port_and_an_empty_store(group: Group) -> None:
    a, b = group.agent(), group.agent()
    first = group.round(a, b)
    first[0].store.set("stale", "1")

    second = group.round(a, b)

    assert first[0].bootstrap_store_info.master_port != second[0].bootstrap_store_info.master_port
    assert not second[0].store.check(["stale"])
    assert group.stores[0].read_prefix(KEYS.round_store(1)).entries == ()


def test_one_who_comes_back_recalls_the_others_and_ranks_stay(group: Group) -> None:
    a, b = group.agent(), group.agent()
    ranks = [info.rank for info in group.round(a, b)]

    back = join(a)
    await_recall(b)
    (again,) = group.round(b)

    assert [back.result(20).rank, again.rank] == ranks


def test_a_newcomer_recalls_those_who_run_and_gets_the_last_rank(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)

    newcomer = join(group.agent())
    await_recall(a)
    await_recall(b)
    group.round(a, b)

    info = newcomer.result(20)
    assert (info.rank, info.world_size) == (2, 3)


@pytest.mark.case("R13")
def test_a_lost_agent_is_left_out_of_the_next_round(group: Group) -> None:
    a, b, c = (group.agent() for _ in range(3))
    group.round(a, b, c)

    group.stores[1].renewing = False  # frozen
    fence(group, b)
    await_recall(a)
    await_recall(c)

    assert {info.world_size for info in group.round(a, c)} == {2}


def test_a_fenced_agent_restarts_its_workers_and_comes_back_as_another_node(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)
    before = node_id(b)

    fence(group, b)
    await_recall(b)
    await_recall(a)
    infos = group.round(a, b)

    assert sorted(info.rank for info in infos) == [0, 1]
    assert node_id(b) != before


def test_a_lone_agent_that_was_fenced_restarts_its_workers_though_nobody_recalls_it() -> None:
    group = Group(min_nodes=1, max_nodes=1)
    agent = group.agent()
    group.round(agent)
    fence(group, agent)
    await_recall(agent)
    assert group.round(agent)[0].world_size == 1
    group.close()


def test_the_loss_of_the_coordinator_costs_no_more_than_any_other(group: Group) -> None:
    agents = [group.agent() for _ in range(3)]
    group.round(*agents)
    entry = group.stores[0].read(KEYS.leader)
    assert entry is not None
    leader = next(
        a for a in agents if a._member and a._member.standing.record.node_id == entry.value.decode()
    )
    others = [agent for agent in agents if agent is not leader]

    leader._leave()
    for agent in others:
        await_recall(agent)

    assert {info.world_size for info in group.round(*others)} == {2}


def test_an_agent_beyond_the_maximum_waits_on_past_the_join_timeout_and_is_promoted() -> None:
    group = Group(min_nodes=1, max_nodes=1)
    first = group.agent()
    group.round(first)

    spare = join(group.agent(join_timeout_s=0.2))
    with pytest.raises(TimeoutError):
        spare.result(0.6)
    assert first.num_nodes_waiting() == 0
    first._leave()

    assert spare.result(20).rank == 0
    group.close()


def test_too_few_agents_are_a_timeout_that_says_how_many_there_are_and_leave_nothing() -> None:
    group = Group(join_timeout_s=0.3)
    with pytest.raises(RendezvousTimeoutError, match="1 nodes are there, at least 2 are needed"):
        group.agent().next_rendezvous()
    assert group.stores[0].read_prefix(KEYS.nodes).entries == ()


def test_what_a_dead_coordinator_left_half_written_is_not_part_of_the_round(group: Group) -> None:
    a, b = group.agent(), group.agent()
    ghost = Assignment(number=1, node_id=NodeId("ghost.1"), group_rank=0, first_rank=0, slots=1)
    group.stores[0].put(KEYS.assignment(1, ghost.node_id), encode(ghost))

    group.round(a, b)

    entries = group.stores[0].read_prefix(KEYS.generation(1)).entries
    assert {entry.key for entry in entries} == {KEYS.assignment(1, NodeId(node_id(each))) for each in (a, b)}


# ---- the end ---------------------------------------------------------------------------------


def test_a_closed_run_is_closed_for_all_and_says_how_to_run_again(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)
    a.set_closed()
    assert b.is_closed()
    with pytest.raises(RendezvousClosedError, match="give another --rdzv-id"):
        b.next_rendezvous()
    with pytest.raises(RendezvousClosedError, match="succeeded"):
        group.agent().next_rendezvous()


def test_closing_wakes_an_agent_that_waits(group: Group) -> None:
    a, b = group.agent(), group.agent()
    waiting = join(a)
    b.set_closed()
    with pytest.raises(RendezvousClosedError):
        waiting.result(5)


def test_the_last_one_out_leaves_only_the_outcome(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)[0].store.set("x", "1")
    server = group.server

    assert a.shutdown() is True
    assert b.shutdown() is True

    entries = MemoryStore(server).read_prefix(KEYS.prefix).entries
    assert [entry.key for entry in entries] == [KEYS.closed]
    assert entries[0].lease != 0
    assert decode(Closed, entries[0].value).outcome is Outcome.SUCCEEDED


def test_a_shutdown_during_an_exception_records_a_failure(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        a.shutdown()
    entry = MemoryStore(group.server).read(KEYS.closed)
    assert entry is not None
    closed = decode(Closed, entry.value)
    assert (closed.outcome, closed.reason) == (Outcome.FAILED, "ZeroDivisionError on node-0")


def test_one_who_never_took_part_closes_nothing(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)
    try:
        raise RendezvousTimeoutError
    except RendezvousTimeoutError:
        group.agent().shutdown()
    assert not a.is_closed()


# ---- the store's faults ----------------------------------------------------------------------


def test_calls_without_an_answer_are_repeated(group: Group) -> None:
    a, b = group.agent(), group.agent()
    for call in ("grant", "transact", "read"):
        group.stores[0].faults += [Fault(call=call, error=NO_ANSWER.error)]
    assert len(group.round(a, b)) == 2


def test_a_store_that_stays_away_ends_the_wait_with_its_reason() -> None:
    group = Group(join_timeout_s=0.5)
    agent = group.agent()
    group.server.go_away()
    with pytest.raises(RendezvousConnectionError, match="away"):
        agent.next_rendezvous()


def test_training_goes_on_while_the_store_is_away(group: Group) -> None:
    a, b = group.agent(), group.agent()
    group.round(a, b)
    group.server.go_away()
    assert (a.num_nodes_waiting(), b.num_nodes_waiting()) == (0, 0)
    assert a.is_closed() is False
    group.server.come_back()
    assert len(group.round(a, b)) == 2


def test_a_refusal_is_an_error_and_not_a_wait(group: Group) -> None:
    agent = group.agent()
    group.stores[0].faults.append(Fault(call="grant", error=StoreRefused("permission denied")))
    with pytest.raises(RendezvousStateError, match="permission denied"):
        agent.next_rendezvous()


def test_a_coordinator_that_is_refused_says_so_to_its_agent(group: Group) -> None:
    a, b = group.agent(), group.agent()
    for store in group.stores:
        store.faults.append(Fault(call="transact", key=KEYS.generations, error=StoreRefused("no space")))
    waiting = [join(a), join(b)]
    (first, *_), _ = futures.wait(waiting, 20, return_when=futures.FIRST_COMPLETED)
    with pytest.raises(RendezvousStateError, match="no space"):
        first.result()


def test_a_commit_whose_answer_was_lost_is_not_repeated(group: Group) -> None:
    a, b = group.agent(), group.agent()
    for store in group.stores:
        store.faults.append(
            Fault(call="transact", key=KEYS.current, error=StoreUnavailable("arranged"), applied=True)
        )
    infos = group.round(a, b)
    assert sorted(info.rank for info in infos) == [0, 1]
    assert (a.num_nodes_waiting(), b.num_nodes_waiting()) == (0, 0)
