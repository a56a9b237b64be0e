"""Whatever creating call of the engine goes wrong, nothing is left, and the same command succeeds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.providers.docker_engine import RUN_LABEL
from tests.docker.door import EngineDoor, in_front_of_the_engine
from tests.docker.engine import IMAGE, required_client, required_image

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("prefect_server"),
]

SCRIPT = Path(__file__).parents[1] / "scripts" / "nothing.py"
CALLS = 7
"""Network, etcd, two nodes: each container is created and started."""
FIRST_TRAINS = 6
"""From here on the first node runs."""
NIGHTLY = os.environ.get("ELASTIC_NIGHTLY") == "1"
CASES = [(at, how) for at in range(1, CALLS + 1) for how in ("fails", "lost", "killed")]
SOME = [(3, "fails"), (4, "lost"), (7, "killed")]


@pytest.fixture(scope="module")
def door() -> Iterator[EngineDoor]:
    required_image(required_client(), IMAGE)
    with (
        tempfile.TemporaryDirectory(prefix="et-") as directory,
        in_front_of_the_engine(Path(directory)) as made,
    ):
        yield made


def start(door: EngineDoor, directory: Path) -> subprocess.Popen[str]:
    from prefect.settings import PREFECT_API_URL

    job = {
        "name": "leaks",
        "nodes": {"min": 1, "max": 2, "target": 2},
        "training": {"kind": "script", "script": str(SCRIPT)},
        "pool": {"kind": "docker", "image": IMAGE},
    }
    (directory / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "flows.cli", "train", str(directory / "job.yaml")]
    return subprocess.Popen(
        [*command, "--runs", str(directory / "runs")],
        env={**os.environ, "DOCKER_HOST": door.host, "PREFECT_API_URL": str(PREFECT_API_URL.value())},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left(engine: Any, directory: Path) -> list[str]:
    """Return what the engine still has of this directory's runs."""
    runs = [f"{RUN_LABEL}={run.name}" for run in (directory / "runs").glob("*-*")]
    found = []
    for label in runs:
        found += engine.containers.list(all=True, filters={"label": label})
        found += engine.networks.list(filters={"label": label})
    return [thing.name for thing in found]


@pytest.mark.case("A03")
@pytest.mark.parametrize(("at", "how"), CASES if NIGHTLY else SOME)
def test_whatever_create_call_goes_wrong_nothing_is_left_and_the_same_command_succeeds(
    door: EngineDoor, tmp_path: Path, at: int, how: str
) -> None:
    engine = required_client()
    door.arm(at, "fails" if how == "fails" else "lost")
    with start(door, tmp_path) as first:
        if how == "killed":
            assert door.fired.wait(60), "the call was never made"
            first.kill()  # the call was made, and nobody heard its answer
        said, _ = first.communicate()
    assert door.fired.is_set(), said
    if how == "fails":
        # One node is enough for this job: it trains on while the second one is refused.
        assert first.returncode == (1 if at < FIRST_TRAINS else 0), said
        told = said.splitlines()[-1] if at < FIRST_TRAINS else said
        assert "the Docker engine refused: injected" in told
    if how == "lost":
        assert first.returncode in (0, 1), said
    if how != "killed":
        assert left(engine, tmp_path) == [], said

    door.arm(0, "lost")
    with start(door, tmp_path) as second:
        again, _ = second.communicate()
    assert second.returncode == 0, said + again
    assert left(engine, tmp_path) == []
