"""The agent's machine: its end, and its table as a whole."""

from pathlib import Path

import pytest

from elastic_core.agent.core import AgentCore, diagram
from elastic_core.agent.events import (
    AgentPolicy,
    AgentStarted,
    Exit,
    Registered,
    RunClosed,
    StopWorkers,
    StoreSilent,
    WorkersStopped,
)
from elastic_core.agent.table import ROWS, AgentState
from elastic_core.errors import IllegalEvent
from tests.elastic_core.agent import test_core_failures, test_core_generations, test_core_leaving  # noqa: F401  # their scenes
from tests.elastic_core.agent.scenes import (
    DIED,
    FAILED,
    FENCED,
    ME,
    SIGTERM,
    STOP,
    SUCCEEDED,
    TICK,
    Scene,
    broke,
    elastic,
    ended,
    published,
    raised,
    scene,
    told,
    torchrun,
)


@scene
def test_a_closed_run_ends_every_agent_with_its_code() -> None:
    closed = RunClosed(closed=FAILED)
    for state in (
        Scene("torchrun"),
        Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)),
        torchrun(),
        torchrun(published(1)),
        torchrun(published(1), published(2)),
        elastic(published(1), SIGTERM),
        elastic(published(1), STOP),
        elastic(published(1), FENCED),
    ):
        state.after([]).tell(closed, WorkersStopped())
        assert state.acts == [StopWorkers(grace=5.0), Exit(code=3, reason="1 failure, budget 0")]


@scene
def test_an_agent_that_has_nothing_to_do_ends_when_the_store_stays_away() -> None:
    silent = StoreSilent(seconds=601)
    for state, code in (
        (Scene("torchrun").tell(AgentStarted()), 69),
        (Scene("torchrun").tell(AgentStarted(), Registered(node_id=ME)), 69),
        (torchrun(), 69),
        (torchrun(published(1), STOP, WorkersStopped()), 69),
        (torchrun(published(1), ended(0)), 0),
    ):
        state.after([]).tell(silent, WorkersStopped())
        assert state.acts[-1] == Exit(code=code, reason="the store did not answer for 601 s")


def test_training_goes_on_however_long_the_store_stays_away() -> None:
    assert torchrun(published(1)).tell(StoreSilent(seconds=9_000)).acts == []


def test_late_facts_change_nothing_once_the_agent_has_ended() -> None:
    over = torchrun(published(1), ended(0), RunClosed(closed=SUCCEEDED)).after([])
    for fact in (
        SIGTERM,
        STOP,
        FENCED,
        DIED,
        TICK,
        ended(-9),
        WorkersStopped(),
        published(2),
        broke(1),
        raised(),
    ):
        assert over.tell(fact).acts == []
    assert over.state is AgentState.ENDED


def test_a_fact_that_cannot_be_is_refused_with_the_story_and_changes_nothing() -> None:
    agent = AgentCore(AgentPolicy(slots=1, api="torchrun"))
    agent.handle(AgentStarted(), 1.0)
    agent.handle(Registered(node_id=ME), 2.0)
    with pytest.raises(IllegalEvent, match=r"(?s)no transition from warming on AgentStarted.*Registered"):
        agent.handle(AgentStarted(), 3.0)
    assert agent.state is AgentState.WARMING


def test_every_row_of_the_table_is_told_by_a_scene(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = set()
    handle = AgentCore.handle

    def noting(core: AgentCore, *arguments: object) -> object:
        commands = handle(core, *arguments)  # type: ignore[arg-type]
        taken.add(id(core.taken))
        return commands

    monkeypatch.setattr(AgentCore, "handle", noting)
    for tell in told:
        tell()
    missed = [f"{row.state} {row.fact.__name__} {row.when}" for row in ROWS if id(row) not in taken]
    assert missed == []


def test_the_picture_in_the_docs_is_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs" / "agent.md").read_text()
    assert f"```mermaid\n{diagram()}\n```" in page, "run: python -m elastic_core.agent.core"
