"""The life of a run: signals, death of the flow in any phase, and who comes next."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_core.model.membership import Outcome
from tasks.process import wait_ended
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
