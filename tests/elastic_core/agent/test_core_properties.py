"""The agent's machine in a random world: workers, leases and generations that come and go at any time."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_core.agent.core import AgentCore
from elastic_core.agent.events import (
    AgentCommand,
    AgentEvent,
    AgentPolicy,
    AgentStarted,
    DrainRequested,
    Exit,
    ForceRequested,
    ForkServerDied,
    ForkServerReady,
    LeaseEnded,
    Register,
    Registered,
    ReplaceWorker,
    RunClosed,
    SendToWorkers,
    StartWorkers,
    StopRequested,
    StopWorkers,
    TimeAdvanced,
    WakeAt,
    WarmForkServer,
    WorkersStopped,
    WriteStatus,
)
from elastic_core.agent.table import AgentState
from elastic_core.ids import NodeId
from elastic_core.model.messages import EnterGeneration, StopTraining
from elastic_core.model.node import NodePhase
from tests.elastic_core.agent.scenes import (
    FAILED,
    broke,
    ended,
    left,
    progressed,
    published,
    raised,
    ready,
    without_me,
)

SLOTS = 2


class AgentInTheWorld(RuleBasedStateMachine):
    """Keeps what is true outside of the agent, and checks each command against it."""

    api = "elastic"

    def __init__(self) -> None:
        super().__init__()
        self.core = AgentCore(AgentPolicy(slots=SLOTS, api=self.api))  # type: ignore[arg-type]
        self.now = 0.0
        self.alive: set[int] = set()
        self.is_warming = False
        self.is_warm = False
        self.is_stopping = False
        self.wake_at: float | None = None
        self.registering = False
        self.node_id = 0
        self.has_lease = False
        self.number = 0
        self.entered = 0
        self.exits: list[Exit] = []

    def tell(self, event: AgentEvent) -> None:
        for command in self.core.handle(event, self.now):
            self.perform(command)

    def perform(self, command: AgentCommand) -> None:
        assert not self.exits, "an agent that exits does nothing more"
        match command:
            case WarmForkServer():
                assert not self.is_warm
                self.is_warming = True
            case Register(renew=renew):
                if renew:
                    assert not self.alive, "a node comes back only after its workers ended"
                    self.node_id += 1
                    self.entered = self.number  # what was published before is for the id before
                self.registering, self.has_lease = True, False
            case StartWorkers(part=part):
                assert not self.alive
                assert not self.is_stopping
                self.alive = set(range(SLOTS))
                if part is not None:
                    self.enter(part.generation.number)
            case ReplaceWorker(local_rank=local_rank):
                assert local_rank not in self.alive
                assert not self.is_stopping
                self.alive.add(local_rank)
            case SendToWorkers(message=EnterGeneration(generation=generation)):
                self.enter(generation.number)
            case SendToWorkers(message=StopTraining()):
                assert self.wake_at is None or self.wake_at >= self.now
            case StopWorkers():
                self.is_stopping = True
            case WakeAt(at=at):
                assert at >= self.now
                self.wake_at = at
            case WriteStatus(status=status):
                assert status.generation <= self.number
                if status.phase is NodePhase.READY:
                    assert self.core.memory.is_set_up
            case Exit():
                assert not self.alive, "no worker outlives its agent's decision to exit"
                self.exits.append(command)

    def enter(self, number: int) -> None:
        assert number > self.entered, "a generation is never entered twice, nor an older one"
        self.entered = number

    # ---- what may happen ---------------------------------------------------------------------

    @initialize()
    def start(self) -> None:
        self.tell(AgentStarted())

    @precondition(lambda self: self.registering)
    @rule()
    def the_record_is_written(self) -> None:
        self.registering, self.has_lease = False, True
        self.tell(Registered(node_id=NodeId(f"a.{self.node_id}")))

    @precondition(lambda self: self.has_lease)
    @rule()
    def the_lease_ends(self) -> None:
        self.has_lease = False
        self.tell(LeaseEnded(node_id=NodeId(f"a.{self.node_id}")))

    @precondition(lambda self: self.is_warming)
    @rule()
    def the_fork_server_is_warm(self) -> None:
        self.is_warming, self.is_warm = False, True
        self.tell(ForkServerReady())

    @precondition(lambda self: self.is_warm)
    @rule()
    def the_fork_server_dies(self) -> None:
        self.is_warm = False
        for local_rank in sorted(self.alive):
            self.end(local_rank, -9)
        self.tell(ForkServerDied(reason="killed"))

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), code=st.sampled_from([0, 0, 1, -9, -15]))
    def a_worker_ends(self, data: Any, code: int) -> None:
        self.end(data.draw(st.sampled_from(sorted(self.alive))), code)

    @precondition(lambda self: self.alive)
    @rule(data=st.data(), consequence=st.booleans())
    def a_worker_raises(self, data: Any, consequence: bool) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.alive)))
        self.tell(raised(local_rank, consequence=consequence))
        self.end(local_rank, 1)

    def end(self, local_rank: int, code: int) -> None:
        if local_rank in self.alive:
            self.alive.discard(local_rank)
            self.tell(ended(code, local_rank))

    @precondition(lambda self: self.alive and self.is_warm)
    @rule(data=st.data(), back=st.integers(0, 2))
    def a_worker_speaks(self, data: Any, back: int) -> None:
        local_rank = data.draw(st.sampled_from(sorted(self.alive)))
        number = max(self.number - back, 0)
        says = [ready(local_rank), broke(number, local_rank), left(number, local_rank), progressed(number, 5)]
        self.tell(data.draw(st.sampled_from(says)))

    @precondition(lambda self: self.is_stopping)
    @rule()
    def the_workers_are_stopped(self) -> None:
        if self.is_warm:
            for local_rank in sorted(self.alive):
                self.end(local_rank, -15)
        self.alive.clear()
        self.is_stopping = False
        self.tell(WorkersStopped())

    @precondition(lambda self: self.has_lease)
    @rule(member=st.booleans(), first_rank=st.integers(0, 1))
    def a_generation_is_published(self, member: bool, first_rank: int) -> None:
        self.number += 1
        with_me = published(self.number, first_rank=first_rank * SLOTS, slots=SLOTS)
        self.tell(with_me if member else without_me(self.number))

    @rule(seconds=st.floats(0.1, 40))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        if self.wake_at is not None and self.now >= self.wake_at:
            self.wake_at = None
            self.tell(TimeAdvanced())

    @rule(
        fact=st.sampled_from(
            [
                DrainRequested(reason="SIGTERM"),
                StopRequested(reason="flow"),
                RunClosed(closed=FAILED),
                ForceRequested(exit_code=143, reason="second SIGTERM"),
            ]
        )
    )
    def somebody_asks(self, fact: AgentEvent) -> None:
        self.tell(fact)

    # ---- what always holds -------------------------------------------------------------------

    @invariant()
    def the_agents_idea_of_its_workers_is_true(self) -> None:
        if not self.exits:
            assert self.core.memory.alive == self.alive

    @invariant()
    def whoever_waits_for_workers_to_end_will_hear_of_it(self) -> None:
        if self.core.state in (
            AgentState.LEAVING,
            AgentState.FENCED,
            AgentState.HALTING,
            AgentState.STOPPING,
        ):
            assert self.is_stopping or (self.alive and self.wake_at is not None)

    @invariant()
    def whoever_drains_has_a_deadline(self) -> None:
        if self.core.state is AgentState.DRAINING:
            assert self.wake_at is not None


class TorchrunAgentInTheWorld(AgentInTheWorld):
    """The same for workers of the torchrun contract."""

    api = "torchrun"


_SETTINGS = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestElasticAgent = AgentInTheWorld.TestCase
TestElasticAgent.settings = _SETTINGS
TestTorchrunAgent = TorchrunAgentInTheWorld.TestCase
TestTorchrunAgent.settings = _SETTINGS
