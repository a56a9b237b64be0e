"""Scenes of a coordinator that its tests begin with."""

from dataclasses import replace

from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause
from elastic_core.model.node import NodePhase
from elastic_core.rendezvous.events import (
    CoordinatorCommand,
    PublishGeneration,
)
from elastic_core.testing.scenario import DEFAULT_POLICY, Scenario


def scenario(*, manual: bool = False, **policy: float) -> Scenario:
    return Scenario(replace(DEFAULT_POLICY, **policy), manual=manual)  # type: ignore[arg-type]


def running(*names: str, **policy: float) -> Scenario:
    """A run whose first generation is entered by the named nodes."""
    run = scenario(**policy)
    run.target(len(names))
    for name in names:
        run.seen(name)
    run.enter()
    assert run.members == names
    run.target(run.policy.max_nodes)
    run.commands.clear()
    return run


def failure(node: str, **changes: object) -> Failure:
    known: dict[str, object] = {
        "node_id": NodeId(node),
        "generation": 1,
        "rank": 1,
        "local_rank": 0,
        "exit_code": 1,
        "message": "ValueError: bad label 7",
        "location": "train.py:12",
        "step": 10,
        "started": True,
    }
    return Failure(**(known | changes))  # type: ignore[arg-type]


def fail(run: Scenario, node: str, **changes: object) -> list[CoordinatorCommand]:
    """A node reports a failed worker, as an elastic agent does: record and failure at once."""
    number = run.generation.number if run.generation else 0
    told = run.failure(failure(node, **({"generation": number} | changes)))
    return told + run.seen(node, failed=number, phase=NodePhase.WARMING)


def of(kind: type, commands: list[CoordinatorCommand]) -> list[CoordinatorCommand]:
    return [command for command in commands if isinstance(command, kind)]


def stay_silent(run: Scenario) -> list[CoordinatorCommand]:
    """Let the three rounds of an inquiry go by, the timer ringing as asked; return what follows."""
    commands: list[CoordinatorCommand] = []
    for _ in range(3):
        run.now += 0.101
        commands = run.tick()
    return commands


def causes(run: Scenario) -> list[Cause]:
    return [c.generation.cause for c in run.commands if isinstance(c, PublishGeneration)]


def lost(run: Scenario) -> dict[str, str]:
    entry = run.view.history
    return dict(entry.lost) if entry else {}


def succeed(run: Scenario, node: str) -> list[CoordinatorCommand]:
    """A member's workers ended well."""
    number = run.generation.number if run.generation else 0
    return run.seen(node, phase=NodePhase.SUCCEEDED, generation=number)
