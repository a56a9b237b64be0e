"""What agents are told on their command line."""

from pathlib import Path

import pytest

from elastic_core.model.job import AwsPool, ClassyTraining, JobSpec, LocalPool, NodeBounds, ScriptTraining
from tasks.agents import Attempt
from tasks.runs import RunDirectory


def attempt(job: JobSpec, tmp_path: Path) -> Attempt:
    return Attempt(
        job=job, directory=RunDirectory(tmp_path / "digits-1"), number=2, endpoint="127.0.0.1:2379"
    )


@pytest.mark.case("L04")
def test_a_script_gets_its_arguments_byte_for_byte_at_the_end(tmp_path: Path) -> None:
    arguments = ("--note", "a b", "$HOME", "50%d", "")
    job = JobSpec(training=ScriptTraining(script="/x/train.py", args=arguments, preload=("numpy",)))
    command = attempt(job, tmp_path).launch_request("start", 1).command
    assert command[-6:] == ("/x/train.py", *arguments)
    assert "--preload=numpy" in command
    assert "--worker-api=torchrun" in command


@pytest.mark.parametrize(("entry", "flag"), [("module", "-m"), ("program", "--no-python")])
def test_what_is_no_script_is_started_as_what_it_is(tmp_path: Path, entry: str, flag: str) -> None:
    training = ScriptTraining.model_validate({"script": "theirs", "entry": entry, "args": ["-c", "x"]})
    command = attempt(JobSpec(training=training), tmp_path).launch_request("start", 1).command
    assert command[-4:] == (flag, "theirs", "-c", "x")


def test_a_classy_training_runs_our_trainer_on_the_elastic_api(tmp_path: Path) -> None:
    command = attempt(JobSpec(training=ClassyTraining()), tmp_path).launch_request("start", 1).command
    assert command[-3:] == ("-m", "elastic_core.trainer", "run")
    assert "--worker-api=elastic" in command


@pytest.mark.parametrize(
    ("nodes", "flag"),
    [
        (NodeBounds(target=2, multiple_of=2), "--node-sizes=x2"),
        (NodeBounds(target=2, sizes=(4, 2)), "--node-sizes=2,4"),
    ],
)
def test_allowed_sizes_are_told(nodes: NodeBounds, flag: str, tmp_path: Path) -> None:
    assert flag in attempt(JobSpec(nodes=nodes), tmp_path).launch_request("start", 1).command


def test_bounds_store_run_and_directory_are_told(tmp_path: Path) -> None:
    job = JobSpec(nodes=NodeBounds(min=1, max=3, target=2), workers_per_node=1)
    request = attempt(job, tmp_path).launch_request("start", 2)
    assert {
        "--nnodes=1:3",
        "--nproc-per-node=1",
        "--rdzv-endpoint=127.0.0.1:2379",
        "--rdzv-id=digits-1",
        f"--run-dir={tmp_path}/digits-1",
        f"--job={tmp_path}/digits-1/job.json",
    } <= set(request.command)
    assert request.environment == {"ELASTIC_ATTEMPT": "2"}


@pytest.mark.case("G06")
@pytest.mark.parametrize(("pool", "listens"), [(LocalPool(), False), (AwsPool(), True)])
def test_only_nodes_of_a_cloud_look_for_its_notices(
    pool: LocalPool | AwsPool, listens: bool, tmp_path: Path
) -> None:
    command = attempt(JobSpec(pool=pool), tmp_path).launch_request("start", 1).command
    assert ("--notices=imds" in command) is listens
