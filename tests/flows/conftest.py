"""One real Prefect server for all tests of a session that ask for it, and flows in processes of their own."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.flows.command import Command


@pytest.fixture(scope="session")
def prefect_server() -> Iterator[None]:
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory for runs."""
    return tmp_path / "runs"


@pytest.fixture
def command(runs: Path) -> Iterator[Callable[..., Command]]:
    """Starts commands; whatever they leave is ended afterwards."""
    from tasks.etcd import EtcdProcess
    from tasks.providers.local import LocalProvider
    from tasks.runs import all_runs

    started: list[Command] = []

    def start(*options: str, **more: Any) -> Command:
        started.append(Command(runs, *options, **more))
        return started[-1]

    yield start
    for each in started:
        each.kill()
    for run in all_runs(runs):
        LocalProvider(runs, grace_s=0).teardown(run.run)
        EtcdProcess(run).stop()
