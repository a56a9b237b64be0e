"""What a pool asks of a job before anything is made; no engine is needed to find it."""

from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import (
    AwsPool,
    CheckpointPolicy,
    DirectoryMount,
    DockerPool,
    JobSpec,
    ScriptTraining,
)
from tasks.faults import kill_node
from tasks.providers.docker_check import check_pool
from tasks.providers.docker_engine import connect
from tasks.validate import resolve

ELSEWHERE = "tcp://10.0.0.1:2375"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text("")
    return path


def mounts_of(job: JobSpec) -> list[tuple[str, str, bool]]:
    pool = resolve(job).pool
    assert isinstance(pool, DockerPool)
    return [(mount.source, mount.target, mount.read_only) for mount in pool.mounts]


def test_containers_see_the_directory_of_their_script(script: Path) -> None:
    job = JobSpec(pool=DockerPool(), training=ScriptTraining(script=str(script)))
    assert mounts_of(job) == [(str(script.parent), str(script.parent), True)]


def test_a_script_that_is_mounted_already_is_not_mounted_again(script: Path) -> None:
    mount = DirectoryMount(source=str(script.parent), target=str(script.parent), read_only=False)
    job = JobSpec(pool=DockerPool(mounts=(mount,)), training=ScriptTraining(script=str(script)))
    assert mounts_of(job) == [(mount.source, mount.target, False)]


def test_all_mistakes_of_a_pool_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", ELSEWHERE)
    pool = DockerPool(mounts=(DirectoryMount(source="/no/such", target="/data"),))
    with pytest.raises(RefusedInput) as raised:
        check_pool(pool, CheckpointPolicy(directory="/data/checkpoints"))
    source, checkpoint, host = raised.value.problems
    assert source.startswith("pool.mounts.0.source: '/no/such' is not a directory of this machine")
    assert checkpoint.startswith("checkpoint.directory: '/data/checkpoints' is not mounted")
    assert host.startswith(f"DOCKER_HOST: '{ELSEWHERE}' is another machine")


def test_an_engine_elsewhere_is_refused_before_it_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "ssh://me@gpu.example")
    with pytest.raises(RefusedInput, match=r"use an engine of this machine, or pool\.kind 'aws'"):
        connect()


def test_nodes_of_a_cloud_are_not_killed_by_the_demonstration(tmp_path: Path) -> None:
    job = JobSpec(pool=AwsPool())
    with pytest.raises(RefusedInput, match="nodes of 'aws' cannot be killed from here"):
        kill_node(job, tmp_path, "digits-1", "node-1")  # type: ignore[arg-type]
