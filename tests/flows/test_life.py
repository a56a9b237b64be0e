"""The life of a run: signals, death of the flow in any phase, an API that goes away, and who comes next."""

import json
import signal
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
from tasks.process import wait_ended
from tasks.providers.local import LocalProvider
from tasks.reconcile import Scope, reconcile
from tasks.runs import all_runs
from tests.flows.command import Command, agents_of, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]

Start = Callable[..., Command]


@pytest.mark.case("G02")
@pytest.mark.case("P04")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["begins", "generation 1"])
def test_a_stop_leaves_nothing_within_ten_seconds_and_the_same_command_goes_on(
    runs: Path, command: Start, number: signal.Signals, moment: str
) -> None:
    first = command()
    first.until(moment)
    asked_at = time.monotonic()
    first.process.send_signal(number)
    assert first.finish() == 75
    (run,) = all_runs(runs)
    assert processes_of(run) == []
    assert time.monotonic() - asked_at < 10
    assert run.outcome() is Outcome.PREEMPTED
    assert first.lines[-1] == f"report: {run.report_file}"

    again = command()
    again.until("attempt 2 of run")
    (run.path / "finish").touch()
    assert again.finish() == 0
    assert [found.run for found in all_runs(runs)] == [run.run]


@pytest.mark.case("P07")
@pytest.mark.case("P12")
@pytest.mark.parametrize("moment", ["launching 2 nodes", "generation 1"])
def test_a_flow_killed_in_any_phase_is_followed_by_one_that_adopts_and_doubles_nothing(
    runs: Path, command: Start, moment: str
) -> None:
    first = command()
    first.until(moment)
    first.kill()
    (run,) = all_runs(runs)
    agents = agents_of(run)

    again = command()
    again.until("adopted attempt 1" if processes_of(run) else "attempt")
    again.until("generation 1")
    assert set(agents) <= set(agents_of(run)), "what was started is kept"
    assert len(agents_of(run)) == 2
    (run.path / "finish").touch()
    assert again.finish() == 0
    assert processes_of(run) == []


@pytest.mark.case("P07")
def test_a_flow_killed_while_its_run_ends_is_followed_by_one_that_tells_the_end(
    runs: Path, command: Start
) -> None:
    first = command()
    first.until("generation 1")
    (run,) = all_runs(runs)
    first.process.send_signal(signal.SIGSTOP)  # the nodes finish while the flow does not look
    (run.path / "finish").touch()
    assert wait_ended(processes_of(run), 60) == set()
    first.kill()

    again = command()
    assert again.finish() == 0
    assert (run.attempt(), run.outcome()) == (1, Outcome.SUCCEEDED)
    assert "2 nodes finished generation 1" in json.loads(run.report_file.read_text())["reason"]


def test_where_no_flow_comes_back_the_nodes_end_and_reconcile_finds_the_rest(
    runs: Path, command: Start
) -> None:
    first = command("--set", "timeouts.flow=3")
    first.until("generation 1")
    (run,) = all_runs(runs)
    first.kill()
    assert wait_ended(processes_of(run), 90) == set()
    scope = Scope(runs=str(runs), docker=False)
    assert [one.verdict.is_orphan for one in reconcile(scope).findings] == [False], "it may go on for an hour"
    (etcd,) = reconcile(scope, apply=True, abandoned_after_s=0).findings
    assert (etcd.holding.kind, etcd.outcome) == ("etcd", "ended")
    assert reconcile(scope).findings == ()


@pytest.mark.case("P01")
@pytest.mark.case("P10")
def test_a_cancelled_flow_run_leaves_nothing_and_the_next_goes_on_at_once(runs: Path, command: Start) -> None:
    first = command()
    first.until("generation 1")
    (run,) = all_runs(runs)
    with get_client(sync_client=True) as client:
        (flow_run,) = running(client)
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


def running(client: SyncPrefectClient) -> list[UUID]:
    state = FlowRunFilterState(type=FlowRunFilterStateType(any_=[StateType.RUNNING]))
    return [run.id for run in client.read_flow_runs(flow_run_filter=FlowRunFilter(state=state))]


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


@pytest.mark.case("P03")
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


@pytest.mark.case("P06")
def test_a_second_flow_of_a_job_is_refused_and_creates_nothing(runs: Path, command: Start) -> None:
    first = command()
    first.until("generation 1")
    (run,) = all_runs(runs)
    second = command()
    assert second.finish() == 2
    assert second.lines[-1].startswith(f"job 'waiting' is already running (run {run.run})")
    assert [found.run for found in all_runs(runs)] == [run.run]
    (run.path / "finish").touch()
    assert first.finish() == 0
    assert json.loads(run.report_file.read_text())["state"] == "succeeded"
