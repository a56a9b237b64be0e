"""The life of a run as its Prefect server sees it: cancelled there, and while the server is away."""

import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from uuid import UUID

import httpx
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterState, FlowRunFilterStateType
from prefect.client.schemas.objects import StateType
from prefect.states import Cancelling

from elastic_core.model.membership import Outcome
from tasks import prefect_server
from tasks.prefect_server import ServerRecord
from tasks.providers.local import LocalProvider
from tasks.runs import all_runs
from tests.flows.command import Command, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]

Start = Callable[..., Command]


@pytest.mark.case("P01")
@pytest.mark.case("P10")
def test_a_cancelled_flow_run_leaves_nothing_and_the_next_goes_on_at_once(runs: Path, command: Start) -> None:
    with get_client(sync_client=True) as client:
        others = running(client)  # a killed flow's run stays there for ever
        first = command()
        first.until("generation 1")
        (run,) = all_runs(runs)
        (flow_run,) = running(client) - others
        asked_at = time.monotonic()
        client.set_flow_run_state(flow_run, Cancelling())
        assert first.finish() == 75
        assert time.monotonic() - asked_at < 60
        assert client.read_flow_run(flow_run).state.type is StateType.CANCELLED  # type: ignore[union-attr]
    assert processes_of(run) == []
    assert run.outcome() is Outcome.PREEMPTED
    again = command()
    again.until("attempt 2 of run")
    (run.path / "finish").touch()
    assert again.finish() == 0


def running(client: SyncPrefectClient) -> set[UUID]:
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    return {run.id for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))}


# ---- the API goes away ---------------------------------------------------------------------------


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerRecord]:
    """A server of the test's own, that it may end."""
    record = prefect_server.begin(tmp_path / "home")
    prefect_server.wait_healthy(record, tmp_path / "home")
    yield record
    prefect_server.stop(tmp_path / "home")


CANARIES = {
    "AWS_SECRET_ACCESS_KEY": "canary-of-aws",
    "ELASTIC_STORE_PASSWORD": "canary-of-etcd",
    "PREFECT_API_KEY": "canary-of-prefect",
}


@pytest.mark.case("P08")
@pytest.mark.case("X02")
@pytest.mark.case("X07")
def test_with_the_api_away_nodes_are_replaced_and_the_state_is_true_afterwards(
    runs: Path, command: Start, server: ServerRecord, tmp_path: Path
) -> None:
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", server.port)):
        pass  # it listens on one address of this machine, and that is loopback
    environment = {**CANARIES, "PREFECT_API_URL": server.api, "PREFECT_LOGGING_LEVEL": "DEBUG"}
    flow = command(environment=environment)
    flow.until("generation 1")
    (run,) = all_runs(runs)
    prefect_server.stop(tmp_path / "home")
    LocalProvider(runs).kill(run.run, "node-2")
    flow.until("generation 3")  # smaller, and grown again
    again = prefect_server.begin(tmp_path / "home", port=server.port)
    prefect_server.wait_healthy(again, tmp_path / "home")
    (run.path / "finish").touch()
    assert flow.finish() == 0
    with httpx.Client(base_url=server.api, timeout=30) as api:
        (told,) = api.post("/flow_runs/filter", json={}).json()
    assert (told["state"]["type"], told["state"]["message"]) == (
        "COMPLETED",
        json.loads(run.report_file.read_text())["reason"],
    )
    assert keeping(CANARIES.values(), runs, tmp_path / "home") == []


def keeping(secrets: Iterable[str], *places: Path) -> list[str]:
    """Return the files that hold a secret."""
    files = [path for place in places for path in place.rglob("*") if path.is_file()]
    return [str(path) for path in files if any(one.encode() in path.read_bytes() for one in secrets)]
