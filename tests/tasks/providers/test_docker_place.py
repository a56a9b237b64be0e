"""What runs left on an engine is found by label, and only this runs directory's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.cluster.provider import LaunchRequest
from elastic_core.model.job import DockerPool
from tasks.providers.docker import DockerProvider
from tasks.providers.docker_engine import RUN_LABEL, RUNS_LABEL
from tasks.reconcile import Scope, reconcile
from tests.docker.engine import RUN, left_of

pytestmark = [pytest.mark.docker, pytest.mark.slow]


@pytest.fixture
def runs(stub_image: str, tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    DockerProvider(tmp_path, DockerPool(image=stub_image), grace_s=0).teardown(RUN)


def test_containers_network_and_volume_of_a_run_that_is_gone_are_ended(
    runs: Path, stub_image: str, docker_client: Any
) -> None:
    provider = DockerProvider(runs, DockerPool(image=stub_image, shm_gib=0.0625))
    provider.launch(LaunchRequest(run=RUN, token="t", count=2, command=()))
    labels = {RUN_LABEL: RUN, RUNS_LABEL: str(runs)}
    volume = docker_client.volumes.create(f"elastic-{RUN}-scratch", labels=labels)
    elsewhere = Scope(runs=str(runs / "elsewhere"), local=False)
    assert reconcile(elsewhere, apply=True).findings == ()

    scope = Scope(runs=str(runs), local=False)
    told = reconcile(scope)
    assert sorted((one.holding.kind, one.holding.name) for one in told.orphans) == [
        ("container", f"elastic-{RUN}-node-1"),
        ("container", f"elastic-{RUN}-node-2"),
        ("network", f"elastic-{RUN}"),
        ("volume", volume.name),
    ]
    assert len(left_of(docker_client, RUN)) == 3, "a dry run ends nothing"

    assert reconcile(scope, apply=True).headline() == "4 found, 4 without an owner, 4 ended"
    assert left_of(docker_client, RUN) == []
    assert reconcile(scope, apply=True).findings == ()
