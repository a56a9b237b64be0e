"""The same job file on an emulated AWS: a notice, a failed host, failing calls; nothing is lost or left."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docker.engine import IMAGE, required_client, required_image
from tests.flows.aws_matrix import BASE

pytestmark = [
    pytest.mark.aws,
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.usefixtures("prefect_server", "engine"),
]

EPOCHS = 40
"""Long enough for two new machines to come while the others train on."""

CALLS = ("RunInstances", "CreateLaunchTemplateVersion", "CreateFleet")
NIGHTLY = os.environ.get("ELASTIC_NIGHTLY") == "1"
CASES = (
    [f"{call}:{how}" for call in CALLS for how in ("fails", "lost", "killed")]
    if NIGHTLY
    else ["RunInstances:fails"]
)


@pytest.fixture(scope="module")
def engine() -> Any:
    client = required_client()
    required_image(client, IMAGE)
    return client


@pytest.fixture
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("e")  # short: socket paths have 108 bytes


def ended(process: subprocess.CompletedProcess[str]) -> str:
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def test_a_notice_and_a_failed_host_lose_no_sample_and_leave_no_machine(root: Path) -> None:
    config = {**json.loads(Path("examples/digits.json").read_text()), "num_epochs": EPOCHS}
    emulator = ["-m", "tasks.emulator", "--image", IMAGE, "--host-base", BASE, "--root", str(root)]
    train = [sys.executable, "-m", "flows.cli", "train", "examples/digits.yaml"]
    done = subprocess.run(
        [
            sys.executable,
            *emulator,
            "--stage=spot,crash",
            *train,
            f"--set=training.config={json.dumps(config)}",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    said = ended(done)
    assert said.splitlines()[-1] == "no instance is left, and the emulator ends"
    (file,) = root.glob("efs/*/elastic/*/runs/*/report.json")
    report = json.loads(file.read_text())
    changes = report["generations"]
    assert [row["cause"] for row in changes][:2] == ["start", "drain"]
    assert "spot interruption" in changes[1]["reason"]
    lost = [how for row in changes for how in row["lost"].values()]
    assert any("the host failed" in how for how in lost), lost  # beside it a slow machine may be fenced
    assert (report["epochs"], report["samples_missed"], report["samples_repeated"]) == (EPOCHS, 0, 0)
    assert report["restart_count"] == 0
    assert len(report["costs"]) >= 4  # etcd, two nodes, and what replaced them
    assert report["cost_usd"] > 0
    assert all("agent.log" in " ".join(files) for files in report["logs"].values())


@pytest.mark.case("A03")
def test_whatever_create_call_goes_wrong_nothing_is_left_and_the_same_command_succeeds(root: Path) -> None:
    command = [sys.executable, "-m", "tests.flows.aws_matrix", str(root), *CASES]
    lines = ended(subprocess.run(command, capture_output=True, text=True, check=False)).splitlines()
    stories = [json.loads(line) for line in lines if line.startswith("{")]
    assert [story["case"] for story in stories] == CASES
    for story in stories:
        assert story["fired"] >= 1, story
        assert (story["second"]["rc"], story["second"]["left"]) == (0, []), story
        if story["case"].endswith("fails"):
            assert story["first"]["rc"] == 1, story
            assert "UnauthorizedOperation: injected" in story["first"]["said"][-1], story
        if not story["case"].endswith("killed"):
            assert story["first"]["left"] == [], story
