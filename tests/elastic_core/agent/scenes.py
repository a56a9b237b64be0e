"""Words in which the tests of the agent's machine tell their scenes: facts in, commands out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from elastic_core.agent.core import AgentCore
from elastic_core.agent.events import (
    AgentCommand,
    AgentEvent,
    AgentPolicy,
    AgentStarted,
    DrainRequested,
    ForkServerDied,
    ForkServerReady,
    GenerationPublished,
    LeaseEnded,
    NodeStatus,
    Register,
    Registered,
    ReportFailure,
    Say,
    StopRequested,
    TimeAdvanced,
    WorkerEnded,
    WorkerSpoke,
    WriteStatus,
)
from elastic_core.agent.table import AgentState, Row
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Assignment, Cause, Closed, Generation, Outcome
from elastic_core.model.messages import (
    GenerationLeft,
    GroupBroken,
    ProgressMade,
    WorkerFailed,
    WorkerReady,
)
from elastic_core.model.progress import Progress

ME = NodeId("a.1")
SUCCEEDED = Closed(outcome=Outcome.SUCCEEDED, exit_code=0, reason="done")
FAILED = Closed(outcome=Outcome.FAILED, exit_code=3, reason="1 failure, budget 0")
SIGTERM = DrainRequested(reason="SIGTERM")
STOP = StopRequested(reason="asked by the flow")
FENCED = LeaseEnded(node_id=ME)
DIED = ForkServerDied(reason="the fork server was killed by signal 9")
TICK = TimeAdvanced()

told: list[Callable[[], None]] = []


def generation(number: int, cause: Cause = Cause.START) -> Generation:
    return Generation(
        number=number, cause=cause, restart_count=0, world_size=2, group_world_size=2,
        master_address="10.0.0.1", master_port=20_000, reason="a reason",
    )  # fmt: skip


def part_of(number: int, *, first_rank: int = 0, slots: int = 1) -> Assignment:
    return Assignment(number=number, node_id=ME, group_rank=first_rank, first_rank=first_rank, slots=slots)


def published(number: int, *, first_rank: int = 0, slots: int = 1) -> GenerationPublished:
    """A generation with this node in it."""
    assignment = part_of(number, first_rank=first_rank, slots=slots)
    return GenerationPublished(generation=generation(number), assignment=assignment)


def without_me(number: int) -> GenerationPublished:
    return GenerationPublished(generation=generation(number), assignment=None)


def ready(local_rank: int = 0) -> WorkerSpoke:
    return WorkerSpoke(local_rank=local_rank, message=WorkerReady())


def broke(number: int, local_rank: int = 0, step: int = 7) -> WorkerSpoke:
    return WorkerSpoke(
        local_rank=local_rank, message=GroupBroken(generation=number, step=step, error="reset")
    )


def left(number: int, local_rank: int = 0) -> WorkerSpoke:
    message = GenerationLeft(generation=number, step=9, saved=False)
    return WorkerSpoke(local_rank=local_rank, message=message)


def raised(local_rank: int = 0, **fields: Any) -> WorkerSpoke:
    values: dict[str, Any] = {
        "node_id": NodeId(""), "generation": 0, "rank": -1, "local_rank": local_rank, "exit_code": 1,
        "message": "ValueError: bad label 7", "location": "train.py:12", "started": True,
    }  # fmt: skip
    return WorkerSpoke(local_rank=local_rank, message=WorkerFailed(failure=Failure(**{**values, **fields})))


def progressed(number: int, step: int, local_rank: int = 0) -> WorkerSpoke:
    progress = Progress(generation=number, epoch=0, step=step, samples=step * 8)
    return WorkerSpoke(local_rank=local_rank, message=ProgressMade(progress=progress))


def ended(code: int, local_rank: int = 0) -> WorkerEnded:
    return WorkerEnded(local_rank=local_rank, code=code)


class Scene:
    """An agent's machine, brought to a state by facts; only the reactions to the last ones are kept."""

    def __init__(self, api: str, *, slots: int = 1) -> None:
        self.core = AgentCore(AgentPolicy(slots=slots, api=api))  # type: ignore[arg-type]
        self.slots = slots
        self.now = 100.0
        self.rows: list[Row] = []
        self.commands: list[AgentCommand] = []

    @property
    def state(self) -> AgentState:
        return self.core.state

    @property
    def acts(self) -> list[AgentCommand]:
        """The commands since the last `after`, without what is only said."""
        return [command for command in self.commands if not isinstance(command, Say)]

    def tell(self, *facts: AgentEvent) -> Scene:
        for fact in facts:
            self.commands += self.core.handle(fact, self.now)
            if self.core.taken is not None:
                self.rows.append(self.core.taken)
        return self

    def after(self, facts: Sequence[AgentEvent]) -> Scene:
        """Begin to record after these facts."""
        self.tell(*facts)
        self.commands = []
        return self

    def wait(self, seconds: float) -> Scene:
        self.now += seconds
        return self


def torchrun(*facts: AgentEvent, slots: int = 1) -> Scene:
    """A node that is ready for workers of the torchrun contract."""
    beginning = (AgentStarted(), Registered(node_id=ME), ForkServerReady())
    return Scene("torchrun", slots=slots).after([*beginning, *facts])


def elastic(*facts: AgentEvent, slots: int = 1) -> Scene:
    """A node whose workers of the elastic API are set up."""
    beginning = (AgentStarted(), Registered(node_id=ME), ForkServerReady())
    return Scene("elastic", slots=slots).after([*beginning, *map(ready, range(slots)), *facts])


def scene(test: Callable[[], None]) -> Callable[[], None]:
    """Keep a test for the check that every row of the table is told somewhere."""
    told.append(test)
    return test


def failure_in(scene: Scene) -> Failure:
    """The failure that was reported."""
    (report,) = [command for command in scene.commands if isinstance(command, ReportFailure)]
    return report.failure


def statuses(scene: Scene) -> list[NodeStatus]:
    """What the node's record said, one after the other."""
    return [
        command.status
        for command in scene.commands
        if isinstance(command, WriteStatus | ReportFailure | Register)
    ]
