"""The drivers' parts on a store in memory, whose faults the test arranges."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest

from elastic_core.agent.coordination import CoordinatorDriver, with_successors
from elastic_core.agent.driver import AgentDriver
from elastic_core.agent.events import (
    AgentEvent,
    DrainRequested,
    GenerationPublished,
    LeaseEnded,
    Registered,
    RunClosed,
    StopRequested,
)
from elastic_core.agent.leadership import Leadership
from elastic_core.agent.lease import Standing, register
from elastic_core.agent.outbox import Outbox
from elastic_core.agent.process import Entrypoint
from elastic_core.agent.settings import AgentSettings, Waits
from elastic_core.clock import SystemClock
from elastic_core.ids import NO_LEASE, LeaseId, NodeId, Revision, RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Cause, Closed, Generation, Outcome, Stop, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry, Progress
from elastic_core.rendezvous.events import CoordinatorPolicy
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Condition, Operation, Put, TxnResult, Watch
from elastic_core.testing.memory_store import (
    NO_ANSWER,
    NO_ANSWER_YET_APPLIED,
    Fault,
    MemoryServer,
    MemoryStore,
)
from tests.elastic_core.agent.node import wait_until

KEYS = RunKeys(RunId("r"))
CLOCK = SystemClock()
POLICY = CoordinatorPolicy(
    min_nodes=1, max_nodes=1000, last_call=0.0, join_timeout=60, probe_timeout=0.1, max_restarts=3
)


def node(name: str, phase: NodePhase = NodePhase.READY) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(name), address="127.0.0.1", probe_port=1, probe_token="t", master_port=20_000,
        slots=1, lease=NO_LEASE, phase=phase,
    )  # fmt: skip


class CountingStore(MemoryStore):
    """Notes how many operations each transaction had."""

    def __init__(self, server: MemoryServer) -> None:
        super().__init__(server)
        self.operations: list[int] = []

    def transact(self, conditions: Sequence[Condition], operations: Sequence[Operation]) -> TxnResult:
        self.operations.append(len(operations))
        return super().transact(conditions, operations)


class World:
    """A server, a client of the test's own, and what was started."""

    def __init__(self) -> None:
        self.server = MemoryServer()
        self.store = MemoryStore(self.server)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> World:
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()
        self.server.come_back()
        self.store.close()

    def register(self, name: str, phase: NodePhase = NodePhase.READY) -> Standing:
        return register(self.store, KEYS, node(name, phase), 60)

    def coordinate(
        self, policy: CoordinatorPolicy = POLICY, store: MemoryStore | None = None
    ) -> threading.Thread:
        """Win the leader key and serve a term on a thread."""
        self.store.delete(KEYS.leader)
        won = self.store.put(KEYS.leader, b"a.1")
        driver = CoordinatorDriver(
            store or MemoryStore(self.server), KEYS, policy=policy, leader=won, clock=CLOCK
        )
        thread = threading.Thread(target=driver.run, daemon=True)
        thread.start()
        self._undo.callback(thread.join, 5)
        self._undo.callback(driver.stop)
        return thread

    def lead(self, made: Callable[[Revision], object]) -> Leadership:
        leadership = Leadership(MemoryStore(self.server), KEYS, make_term=made)  # type: ignore[arg-type]
        self._undo.callback(leadership.close)
        return leadership

    def outbox(self, tell: Callable[[AgentEvent], None], store: MemoryStore | None = None) -> Outbox:
        outbox = Outbox(store or MemoryStore(self.server), KEYS, ttl_s=60, tell=tell, clock=CLOCK)
        self._undo.callback(lambda: outbox.close(revoke=True))
        return outbox

    def current(self) -> Generation | None:
        entry = self.store.read(KEYS.current)
        return decode(Generation, entry.value) if entry else None

    def wait_generation(self, number: int) -> Generation:
        wait_until(
            lambda: (g := self.current()) is not None and g.number >= number, f"generation {number}", 10
        )
        found = self.current()
        assert found is not None
        return found

    def assignments(self, number: int) -> list[Assignment]:
        entries = self.store.read_prefix(KEYS.generation(number)).entries
        return [decode(Assignment, entry.value) for entry in entries]


@pytest.fixture
def world() -> Iterator[World]:
    with World() as world:
        yield world


# ---- generations -----------------------------------------------------------------------------


def test_a_generation_is_written_whole_with_its_history(world: World) -> None:
    for name in ("a.1", "b.1"):
        world.register(name)
    world.coordinate(replace(POLICY, max_nodes=2))
    generation = world.wait_generation(1)
    assert (generation.cause, generation.world_size, generation.master_port) == (Cause.START, 2, 20_000)
    assert [(part.node_id, part.successor) for part in world.assignments(1)] == [
        ("a.1", "b.1"),
        ("b.1", "a.1"),
    ]
    entry = world.store.read(KEYS.history_entry(1))
    assert entry is not None
    history = decode(HistoryEntry, entry.value)
    assert history.generation == generation
    assert abs(history.published_at - CLOCK.wall()) < 60
    assert history.detected_at <= history.published_at


def test_a_large_generation_is_written_in_transactions_of_at_most_128_operations(world: World) -> None:
    for number in range(300):
        world.register(f"n-{number:03d}.1")
    store = CountingStore(world.server)
    world.coordinate(replace(POLICY, max_nodes=300), store)
    assert world.wait_generation(1).group_world_size == 300
    assert max(store.operations) <= 128
    assert len(world.assignments(1)) == 300


def test_assignments_of_a_coordinator_that_died_before_its_flip_do_not_survive(world: World) -> None:
    ghost = Assignment(number=1, node_id=NodeId("ghost.1"), group_rank=0, first_rank=0, slots=1)
    world.store.put(KEYS.assignment(1, ghost.node_id), encode(ghost))
    world.register("a.1")
    world.coordinate()
    world.wait_generation(1)
    assert [part.node_id for part in world.assignments(1)] == ["a.1"]


@pytest.mark.parametrize("fault", [NO_ANSWER, NO_ANSWER_YET_APPLIED])
def test_a_flip_without_an_answer_is_read_again_and_never_made_twice(world: World, fault: Fault) -> None:
    world.register("a.1")
    store = MemoryStore(world.server)
    store.faults.append(replace(fault, call="transact"))
    world.coordinate(store=store)
    assert world.wait_generation(1).number == 1
    wait_until(lambda: not store.faults, "the faults happened", 5)
    world.register("b.1")
    assert world.wait_generation(2).cause is Cause.JOIN
    assert len(world.store.read_prefix(KEYS.history).entries) == 2


def test_only_the_two_newest_generations_are_kept(world: World) -> None:
    standings = [world.register("a.1")]
    world.coordinate()
    world.wait_generation(1)
    for number in range(2, 6):
        record = replace(standings[0].record, generation=number - 1)
        world.store.put(KEYS.node(record.node_id), encode(record), record.lease)
        world.register(f"n-{number}.1")
        world.wait_generation(number)
    wait_until(lambda: not world.assignments(3), "generation 3 is deleted", 5)
    assert world.assignments(4)
    assert len(world.store.read_prefix(KEYS.history).entries) == 5


def test_a_coordinator_that_lost_its_key_writes_nothing_any_more(world: World) -> None:
    world.register("a.1")
    term = world.coordinate()
    world.wait_generation(1)
    world.store.delete(KEYS.leader)
    world.register("b.1")
    term.join(5)
    assert not term.is_alive()
    assert world.current().number == 1  # type: ignore[union-attr]


def test_a_write_that_was_late_is_refused_when_another_leads_by_then(world: World) -> None:
    world.register("a.1")
    late = threading.Event()
    store = MemoryStore(world.server)
    store.faults.append(Fault(call="transact", key=KEYS.assignment(1, NodeId("a.1")), until=late))
    term = world.coordinate(store=store)
    wait_until(lambda: not store.faults, "the write is on its way", 5)
    world.store.delete(KEYS.leader)
    world.store.put(KEYS.leader, b"b.1")
    late.set()
    term.join(5)
    assert world.current() is None


def test_a_target_ends_the_last_call(world: World) -> None:
    world.register("a.1")
    world.register("b.1")
    world.coordinate(replace(POLICY, last_call=60))
    world.store.put(KEYS.target, encode(Target(nodes=2)))
    assert world.wait_generation(1).group_world_size == 2


def test_a_silent_member_of_a_broken_generation_is_fenced(world: World) -> None:
    silent = world.register("b.1")
    teller = world.register("a.1")
    world.coordinate(replace(POLICY, max_nodes=2))
    world.wait_generation(1)
    record = replace(teller.record, generation=1, broken=1)
    world.store.put(KEYS.node(record.node_id), encode(record), record.lease)
    generation = world.wait_generation(2)
    assert generation.cause is Cause.LOSS
    assert world.store.read(KEYS.node(silent.record.node_id)) is None


def test_the_outcome_is_written_once_and_ends_the_term(world: World) -> None:
    standing = world.register("a.1")
    world.coordinate()
    world.wait_generation(1)
    record = replace(standing.record, generation=1, phase=NodePhase.SUCCEEDED)
    world.store.put(KEYS.node(record.node_id), encode(record), record.lease)
    wait_until(lambda: world.store.read(KEYS.closed) is not None, "the run is closed", 5)
    entry = world.store.read(KEYS.closed)
    assert decode(Closed, entry.value).outcome is Outcome.SUCCEEDED  # type: ignore[union-attr]


def test_a_watch_that_breaks_is_made_again_from_a_fresh_read(world: World) -> None:
    world.register("a.1")
    world.coordinate()
    world.wait_generation(1)
    world.server.drop_watches()
    world.register("b.1")
    assert world.wait_generation(2).group_world_size == 2


def test_each_node_of_a_generation_watches_the_next_one() -> None:
    parts = [
        Assignment(number=1, node_id=NodeId(name), group_rank=rank, first_rank=rank, slots=1)
        for rank, name in enumerate("abc")
    ]
    assert [part.successor for part in with_successors(parts)] == ["b", "c", "a"]
    assert [part.successor for part in with_successors(parts[:1])] == [""]


# ---- leadership ------------------------------------------------------------------------------


class Term:
    """A term that only notes that it is served."""

    def __init__(self) -> None:
        self.serving = threading.Event()
        self.ended = threading.Event()

    def run(self) -> bool:
        self.serving.set()
        self.ended.wait(10)
        return False

    def stop(self) -> None:
        self.ended.set()


def test_one_of_two_leads_and_the_other_follows_when_its_lease_ends(world: World) -> None:
    first, second = Term(), Term()
    standings = world.register("a.1"), world.register("b.1")
    leader = world.lead(lambda _: first)
    leader.stand(standings[0])
    assert first.serving.wait(5)
    world.lead(lambda _: second).stand(standings[1])
    assert not second.serving.wait(0.1)
    world.store.revoke(standings[0].record.lease)
    assert second.serving.wait(5)


def test_an_answer_that_got_lost_does_not_cost_the_leadership(world: World) -> None:
    term = Term()
    standing = world.register("a.1")
    store = MemoryStore(world.server)
    store.faults.append(NO_ANSWER_YET_APPLIED)
    leadership = Leadership(store, KEYS, make_term=lambda _: term)
    leadership.stand(standing)
    assert term.serving.wait(5)
    leadership.close()


def test_a_node_that_resigns_ends_its_term(world: World) -> None:
    term = Term()
    leadership = world.lead(lambda _: term)
    leadership.stand(world.register("a.1"))
    assert term.serving.wait(5)
    leadership.resign()
    assert term.ended.wait(5)


# ---- the outbox and the lease ----------------------------------------------------------------


class Told:
    """What an agent's loop would get, in order."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[AgentEvent] = queue.SimpleQueue()

    def __call__(self, event: AgentEvent) -> None:
        self.events.put(event)

    def next(self) -> AgentEvent:
        return self.events.get(timeout=5)


def test_a_registration_is_told_before_anything_that_the_store_says_to_it(world: World) -> None:
    told = Told()
    generation = Generation(
        number=3, cause=Cause.JOIN, restart_count=0, world_size=1, group_world_size=1, master_address="h",
        master_port=1,
    )  # fmt: skip
    world.store.put(KEYS.current, encode(generation))
    world.outbox(told).register(node("a.1", NodePhase.WARMING))
    assert told.next() == Registered(node_id=NodeId("a.1"))
    assert told.next() == GenerationPublished(generation=generation, assignment=None)


def test_a_node_hears_of_its_own_drain_of_the_stop_and_of_the_outcome(world: World) -> None:
    told = Told()
    world.outbox(told).register(node("a.1"))
    told.next()
    world.store.put(KEYS.drain(NodeId("b.1")), b"not us")
    world.store.put(KEYS.drain(NodeId("a.1")), b"spot notice")
    assert told.next() == DrainRequested(reason="spot notice")
    world.store.put(KEYS.stop, encode(Stop(reason="enough")))
    assert told.next() == StopRequested(reason="enough")
    closed = Closed(outcome=Outcome.PREEMPTED, exit_code=75, reason="stopped")
    world.store.put(KEYS.closed, encode(closed))
    assert told.next() == RunClosed(closed=closed)


def test_a_revoked_lease_is_told_at_once_and_its_record_is_written_no_more(world: World) -> None:
    told = Told()
    outbox = world.outbox(told)
    outbox.register(node("a.1"))
    told.next()
    world.store.revoke(outbox.standing.record.lease)  # type: ignore[union-attr]
    assert told.next() == LeaseEnded(node_id=NodeId("a.1"))
    outbox.write(node("a.1", NodePhase.DRAINING))
    assert outbox.flush(5)
    assert world.store.read(KEYS.node(NodeId("a.1"))) is None


def test_a_failure_and_the_record_that_tells_of_it_stand_in_one_transaction(world: World) -> None:
    store = CountingStore(world.server)
    outbox = world.outbox(Told(), store)
    outbox.register(node("a.1"))
    failure = Failure(
        node_id=NodeId("a.1"), generation=2, rank=0, local_rank=0, exit_code=137, message="died by signal 9"
    )
    outbox.write(replace(node("a.1"), failed=2), failure)
    assert outbox.flush(5)
    assert store.operations == [1, 2]
    assert world.store.read(KEYS.failure(2, NodeId("a.1"))).value == encode(failure)  # type: ignore[union-attr]


def test_while_the_store_is_away_only_the_newest_record_waits_and_failures_are_kept(world: World) -> None:
    store = CountingStore(world.server)
    outbox = world.outbox(Told(), store)
    outbox.register(node("a.1"))
    assert outbox.flush(5)
    world.server.go_away()
    failure = Failure(node_id=NodeId("a.1"), generation=1, rank=0, local_rank=0, exit_code=1, message="x")
    outbox.write(replace(node("a.1"), generation=1))
    outbox.write(replace(node("a.1"), failed=1), failure)
    for step in range(10):
        outbox.write(replace(node("a.1"), step=step))
    world.server.come_back()
    assert outbox.flush(10)
    record = decode(NodeRecord, world.store.read(KEYS.node(NodeId("a.1"))).value)  # type: ignore[union-attr]
    assert record.step == 9
    assert world.store.read(KEYS.failure(1, NodeId("a.1"))) is not None


def test_progress_is_written_once_a_second_and_the_newest_is_never_lost(world: World) -> None:
    store = CountingStore(world.server)
    outbox = world.outbox(Told(), store)
    outbox.register(node("a.1"))
    for step in range(50):
        outbox.put_progress(Progress(generation=1, epoch=0, step=step, samples=0), NodeId("a.1"))
    assert outbox.flush(5)
    assert len(store.operations) <= 4
    assert decode(Progress, world.store.read(KEYS.progress).value).step == 49  # type: ignore[union-attr]


def test_a_fenced_node_cannot_overwrite_what_its_successor_tells(world: World) -> None:
    outbox = world.outbox(Told())
    outbox.register(node("a.1"))
    assert outbox.flush(5)
    world.store.revoke(outbox.standing.record.lease)  # type: ignore[union-attr]
    world.store.put(KEYS.progress, b"of the successor")
    outbox.put_progress(Progress(generation=1, epoch=0, step=1, samples=0), NodeId("a.1"))
    assert outbox.flush(5)
    assert world.store.read(KEYS.progress).value == b"of the successor"  # type: ignore[union-attr]


def test_a_registration_whose_answer_got_lost_is_made_whole(world: World) -> None:
    told = Told()
    store = MemoryStore(world.server)
    store.faults.append(replace(NO_ANSWER_YET_APPLIED, call="transact"))
    outbox = world.outbox(told, store)
    outbox.register(node("a.1"))
    assert told.next() == Registered(node_id=NodeId("a.1"))
    entry = world.store.read(KEYS.node(NodeId("a.1")))
    assert entry is not None
    assert entry.lease == outbox.standing.record.lease  # type: ignore[union-attr]
    assert entry.lease != LeaseId(0)


def test_leaving_revokes_the_lease_so_that_nobody_waits_for_its_end(world: World) -> None:
    outbox = Outbox(MemoryStore(world.server), KEYS, ttl_s=60, tell=Told(), clock=CLOCK)
    outbox.register(node("a.1"))
    assert outbox.flush(5)
    outbox.close(revoke=True)
    assert world.store.read(KEYS.node(NodeId("a.1"))) is None


class BrokenStore(MemoryStore):
    """A store whose watches fail with an error that no thread knows."""

    def watch(self, keys: Sequence[str], prefixes: Sequence[str] = ()) -> Watch:
        raise ZeroDivisionError("planted")


SLEEPER = AgentSettings(
    min_nodes=1, max_nodes=1, slots=1, run=KEYS.run, name="a", entrypoint=Entrypoint("command", "sleep"),
    args=("1000",),
)  # fmt: skip


def test_a_thread_that_dies_of_a_bug_takes_the_agent_with_it(world: World) -> None:
    driver = AgentDriver(SLEEPER, BrokenStore(world.server), address="127.0.0.1", clock=CLOCK)
    ended = driver.run()
    assert ended.code == 1
    assert "ZeroDivisionError: planted" in ended.reason
    assert world.store.read(KEYS.node(driver.node_id)) is None


def test_an_agent_whose_store_never_comes_back_ends_after_the_join_timeout(world: World) -> None:
    world.server.go_away()
    settings = replace(SLEEPER, waits=Waits(join=0.4))
    ended = AgentDriver(settings, MemoryStore(world.server), address="127.0.0.1", clock=CLOCK).run()
    assert (ended.code, ended.reason) == (69, "the store did not answer for 0 s")


def test_values_that_nobody_of_ours_wrote_are_not_there(world: World) -> None:
    world.store.put(f"{KEYS.nodes}garbage", b"{not json")
    world.store.transact([], [Put(KEYS.target, b"[]")])
    world.register("a.1")
    world.coordinate()
    assert world.wait_generation(1).group_world_size == 1
