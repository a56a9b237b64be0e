"""The same job file on Docker: a container is killed in mid-run, and nothing is lost or left behind."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elastic_core.ids import instance_of
from elastic_core.model.job import ClassyTraining, DockerPool, JobSpec, NodeBounds, ScriptTraining
from elastic_core.model.job_file import parse_job, read_mapping
from elastic_core.model.membership import Outcome
from flows.audience import RunEnd, RunSnapshot, listening
from tasks.overrides import apply_overrides
from tasks.providers.docker_engine import RUN_LABEL
from tasks.runs import all_runs
from tasks.validate import resolve
from tests.docker.engine import IMAGE, left_of, required_client, required_image
from tests.flows.test_train import Watcher

pytestmark = [
    pytest.mark.docker,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("prefect_server"),
]

EPOCHS = 16
"""Long enough for a new container to come while the other one trains on."""

SCRIPT = Path(__file__).with_name("waiting_script.py")
HUNGRY = Path(__file__).parents[1] / "scripts" / "hungry.py"


@pytest.fixture(scope="module")
def engine() -> Any:
    client = required_client()
    required_image(client, IMAGE)
    return client


class Assassin:
    """Kills the container of rank 0, once, in mid-epoch."""

    def __init__(self, engine: Any) -> None:
        self.victim = ""
        self._engine = engine

    def __call__(self, snapshot: RunSnapshot) -> None:
        seen = snapshot.observation
        if self.victim or seen.progress is None or len(seen.nodes) < 2 or seen.progress.step < 30:
            return
        first = next(member for member in seen.history[-1].members if member.group_rank == 0)
        self.victim = instance_of(first.node_id)
        self._engine.containers.get(f"elastic-{snapshot.attempt.directory.run}-{self.victim}").kill()


def train(watcher: Watcher, runs: Path, job: JobSpec) -> RunEnd:
    from flows.train import elastic_train

    with listening(watcher):
        elastic_train(job, runs=str(runs), return_state=True)
    assert watcher.end is not None, watcher.sentences
    return watcher.end


def digits() -> JobSpec:
    mapping = read_mapping(Path("examples/digits.yaml"))
    settings = ["pool.kind=docker", f"pool.image={IMAGE}"]
    job = resolve(parse_job(apply_overrides(mapping, settings), "examples/digits.yaml"))
    assert isinstance(job.training, ClassyTraining)
    assert isinstance(job.training.config, dict)
    config = {**job.training.config, "num_epochs": EPOCHS}
    return job.model_copy(update={"training": job.training.model_copy(update={"config": config})})


def test_a_killed_container_is_replaced_and_every_sample_is_used_exactly_once(
    engine: Any, tmp_path: Path
) -> None:
    assassin = Assassin(engine)
    watcher = Watcher(assassin)
    end = train(watcher, tmp_path, digits())
    assert (end.outcome, end.exit_code) == (Outcome.SUCCEEDED, 0), end.reason
    report = json.loads(end.report.read_text())
    assert [row["cause"] for row in report["generations"]] == ["start", "loss", "join"]
    lost = report["generations"][1]["lost"]
    assert [(instance_of(node), how.rpartition("; ")[2]) for node, how in lost.items()] == [
        (assassin.victim, "killed (137)")
    ]
    assert f"{assassin.victim} ended: killed (137)" in watcher.sentences
    assert (report["epochs"], report["samples_missed"], report["samples_repeated"]) == (EPOCHS, 0, 0)
    assert report["restart_count"] == 0
    assert report["logs"].keys() == {"node-1", "node-2", "node-3"}
    last_line = (end.report.parent / "logs" / "node-3" / "agent.log").read_text().splitlines()[-1]
    assert "ended well" in last_line
    assert left_of(engine, end.run) == []


def test_a_script_of_this_machine_runs_in_containers(engine: Any, tmp_path: Path) -> None:
    job = JobSpec(
        name="waiting",
        nodes=NodeBounds(min=1, max=2, target=2),
        training=ScriptTraining(script=str(SCRIPT)),
        pool=DockerPool(image=IMAGE),
    )

    def finish(snapshot: RunSnapshot) -> None:
        if snapshot.observation.current is not None:
            (snapshot.attempt.directory.path / "finish").touch()

    end = train(Watcher(finish), tmp_path, resolve(job))
    assert (end.outcome, end.exit_code) == (Outcome.SUCCEEDED, 0), end.reason
    assert left_of(engine, end.run) == []


@pytest.mark.parametrize(
    ("settings", "environment", "problem"),
    [
        (
            ["pool.image=127.0.0.1:1/nobody/nothing:1"],
            {},
            "pool.image: '127.0.0.1:1/nobody/nothing:1' is not on this machine and no registry has it",
        ),
        ([], {"DOCKER_HOST": "unix:///nowhere.sock"}, "no Docker engine answers at unix:///nowhere.sock"),
        ([], {"DOCKER_HOST": "tcp://10.0.0.1:2375"}, "DOCKER_HOST: 'tcp://10.0.0.1:2375' is another machine"),
        (["checkpoint.directory=/elsewhere"], {}, "checkpoint.directory: '/elsewhere' is not mounted"),
    ],
)
def test_a_pool_that_cannot_work_is_refused_before_anything_is_made(
    engine: Any, tmp_path: Path, settings: list[str], environment: dict[str, str], problem: str
) -> None:
    given = [f"--set={setting}" for setting in ["pool.kind=docker", f"pool.image={IMAGE}", *settings]]
    command = [sys.executable, "-m", "flows.cli", "train", "examples/digits.yaml", *given, "--runs", tmp_path]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **environment}, check=False
    )
    assert done.returncode == 2, done.stderr
    assert problem in done.stderr
    assert all_runs(tmp_path) == []
    assert engine.containers.list(all=True, filters={"label": RUN_LABEL}) == []


@pytest.mark.case("W05")
def test_a_worker_that_always_runs_out_of_memory_is_not_relaunched_for_ever(
    engine: Any, tmp_path: Path
) -> None:
    job = JobSpec(
        name="hungry",
        nodes=NodeBounds(min=1, max=1, target=1),
        max_restarts=2,
        training=ScriptTraining(script=str(HUNGRY)),
        pool=DockerPool(image=IMAGE, memory_gib=0.75),
    )
    watcher = Watcher(lambda _: None)
    end = train(watcher, tmp_path, resolve(job))
    assert (end.outcome, end.exit_code) == (Outcome.FAILED, 137)
    assert end.reason.startswith("3 failures, budget 2: rank 0 on node node-1.")
    assert "died by signal 9 (SIGKILL), out of memory, limit 768 MiB" in end.reason
    assert len([said for said in watcher.sentences if said.startswith("launching")]) == 1
    assert left_of(engine, end.run) == []
