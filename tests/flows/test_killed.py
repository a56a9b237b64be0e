"""A flow run whose process was killed is told to the server; no other is touched."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import UUID

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import State, StateType
from prefect.states import Cancelling, Completed, Crashed, Failed, Running

from elastic_core.model.codec import encode
from elastic_core.model.job import JobSpec
from flows.killed import FILE, Driver, tell_killed
from tasks.process import ProcessIdentity, identify
from tasks.runs import RunDirectory, job_lock
from tests.flows.command import Command

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]

GONE = ProcessIdentity(pid=1, start_ticks=1, boot="an earlier one")


@flow(name="elastic-train")
def short_flow() -> None:
    """Stands for one that has ended: only its states are looked at."""


@pytest.fixture
def client() -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as client:
        yield client


def a_flow_run(client: SyncPrefectClient, state: State[None]) -> UUID:
    made = client.create_flow_run(short_flow).id
    client.set_flow_run_state(made, state, force=True)
    return made


def a_run(
    runs: Path, name: str, flow_run: UUID, process: ProcessIdentity = GONE, host: str = ""
) -> RunDirectory:
    directory = RunDirectory(runs / name)
    directory.path.mkdir(parents=True)
    directory.begin_attempt(JobSpec(name=name), now=time.time())
    driver = Driver(flow_run=str(flow_run), host=host or socket.gethostname(), process=process)
    (directory.path / FILE).write_bytes(encode(driver))
    return directory


def state_of(client: SyncPrefectClient, flow_run: UUID) -> StateType:
    state = client.read_flow_run(flow_run).state
    assert state is not None
    return state.type


@pytest.mark.case("P03")
def test_no_state_that_ended_is_changed_and_no_living_flow_is_called_dead(
    client: SyncPrefectClient, runs: Path
) -> None:
    ended = [
        a_flow_run(client, state)
        for _ in range(25)
        for state in (Completed(), Failed(), Crashed(), Completed(name="Preempted"))
    ]
    before = [client.read_flow_run(one).state for one in ended]
    for number, one in enumerate(ended):
        a_run(runs, f"ended-{number}", one)
    own = identify(os.getpid())
    assert own is not None
    here, elsewhere, locked = (a_flow_run(client, Running()) for _ in range(3))
    a_run(runs, "here", here, own)
    a_run(runs, "elsewhere", elsewhere, host="another-machine")
    a_run(runs, "locked", locked)
    with job_lock(runs, "locked"):
        assert tell_killed(runs) == ()
    assert [client.read_flow_run(one).state for one in ended] == before
    assert [state_of(client, one) for one in (here, elsewhere, locked)] == [StateType.RUNNING] * 3


def test_what_was_killed_while_it_was_cancelled_is_cancelled(client: SyncPrefectClient, runs: Path) -> None:
    flow_run = a_flow_run(client, Cancelling())
    a_run(runs, "stopping", flow_run)
    assert tell_killed(runs) == (f"stopping: flow run {flow_run} is Cancelled: its process 1 was killed",)
    assert state_of(client, flow_run) is StateType.CANCELLED


def test_a_killed_flow_is_crashed_for_the_server_as_soon_as_somebody_looks(
    client: SyncPrefectClient, runs: Path, command: Callable[..., Command]
) -> None:
    others = crashed(client)
    first = command()
    first.until("generation 1")
    first.kill()
    second = command()
    second.until("attempt 1 of run")
    assert len(crashed(client) - others) == 1, "whoever goes on tells of the one before"
    second.kill()
    (told,) = tell_killed(runs)
    assert told.endswith(f"is Crashed: its process {second.process.pid} was killed")
    assert len(crashed(client) - others) == 2
    assert tell_killed(runs) == ()


def crashed(client: SyncPrefectClient) -> set[UUID]:
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.CRASHED]))
    return {run.id for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))}
