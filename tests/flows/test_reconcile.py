"""The flows that look after what runs hold, on a real Prefect server."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.cluster.provider import LaunchRequest
from elastic_core.ids import RunId
from elastic_core.model.job import JobSpec
from tasks.process import marked
from tasks.providers.local import NODE_MARK, LocalProvider
from tasks.reconcile import Scope
from tasks.runs import RunDirectory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    """A run that failed, whose flow died before it could end the node."""
    directory = RunDirectory(tmp_path / "digits-1")
    directory.path.mkdir()
    directory.begin_attempt(JobSpec(), now=time.time())
    provider = LocalProvider(tmp_path, agent="tests.tasks.providers.stub_agent")
    provider.launch(LaunchRequest(run=RunId("digits-1"), token="t", count=1, command=()))
    directory.report_file.write_text('{"state": "failed"}')
    yield directory
    for process in nodes_of(directory):
        os.kill(process, signal.SIGKILL)


def nodes_of(run: RunDirectory) -> list[int]:
    return [process.pid for process, value in marked(NODE_MARK) if value.startswith(f"{run.path}/")]


def scope(run: RunDirectory) -> Scope:
    return Scope(runs=str(run.path.parent), docker=False)


def test_a_scheduled_reconcile_tells_first_and_ends_what_a_killed_flow_left(run: RunDirectory) -> None:
    from flows.reconcile import elastic_reconcile

    told: Any = elastic_reconcile(scope(run), return_state=True)
    assert (told.type, told.message) == ("COMPLETED", "1 found, 1 without an owner")
    assert nodes_of(run)
    done: Any = elastic_reconcile(scope(run), apply=True, return_state=True)
    assert (done.type, done.message) == ("COMPLETED", "1 found, 1 without an owner, 1 ended")
    assert nodes_of(run) == []


def test_teardown_and_status_are_flows_too(run: RunDirectory) -> None:
    from flows.reconcile import elastic_status, elastic_teardown

    stood: Any = elastic_status("digits-1", str(run.path.parent), return_state=True)
    assert (stood.type, stood.message) == ("COMPLETED", "run digits-1: failed, attempt 1")
    done: Any = elastic_teardown("digits-1", scope(run), return_state=True)
    assert (done.type, done.message) == ("COMPLETED", "1 found, 1 without an owner, 1 ended")
    assert nodes_of(run) == []
