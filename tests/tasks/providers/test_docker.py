"""Containers as nodes: confinement, exit causes, logs, names that are taken, and what cannot be removed."""

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.errors import APIError
from docker.models.containers import Container

from elastic_core.cluster.provider import Instance, InstanceState, LaunchRequest
from elastic_core.errors import InvalidRequest, ProviderError
from elastic_core.model.job import DirectoryMount, DockerPool
from tasks.providers import docker_engine
from tasks.providers.docker import DockerProvider
from tasks.providers.docker_engine import SurvivingContainers
from tests.docker.engine import RUN, left_of

pytestmark = [pytest.mark.docker, pytest.mark.slow]

MIB = 2**20
ABSENT = "127.0.0.1:1/nobody/nothing:1"
"""An image of a registry that does not answer."""

Make = Callable[..., DockerProvider]


@pytest.fixture
def make(stub_image: str, tmp_path: Path) -> Iterator[Make]:
    def made(**pool: Any) -> DockerProvider:
        return DockerProvider(
            tmp_path, DockerPool(**{"image": stub_image, **pool}), grace_s=5, follow_logs=True
        )

    yield made
    DockerProvider(tmp_path, DockerPool(image=stub_image), grace_s=0).teardown(RUN)


def launch(provider: DockerProvider, *command: str, token: str = "t", count: int = 1) -> Instance:
    request = LaunchRequest(run=RUN, token=token, count=count, command=command)
    return provider.launch(request).launched[0]


def container(client: Any, node: str = "node-1") -> Any:
    return client.containers.get(f"elastic-{RUN}-{node}")


def eventually(fact: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, "the fact did not come true in time"
        time.sleep(0.02)


def says(node: Instance, word: str) -> Callable[[], bool]:
    return lambda: Path(node.log).exists() and word in Path(node.log).read_text()


def ended(provider: DockerProvider) -> Callable[[], bool]:
    return lambda: provider.list_nodes(RUN)[0].state is InstanceState.ENDED


def word_after(node: Instance, name: str) -> str:
    words = Path(node.log).read_text().split()
    return words[words.index(name) + 1]


# ---- what a container may do -------------------------------------------------------------------


@pytest.mark.case("D08")
def test_a_container_has_no_rights_no_writable_root_no_restarts_and_bounded_logs(
    make: Make, docker_client: Any
) -> None:
    launch(make())
    config = container(docker_client).attrs["HostConfig"]
    assert config["RestartPolicy"]["Name"] == "no"
    assert config["ReadonlyRootfs"]
    assert config["CapDrop"] == ["ALL"]
    assert config["SecurityOpt"] == ["no-new-privileges"]
    assert config["LogConfig"] == {"Type": "json-file", "Config": {"max-size": "10m", "max-file": "3"}}


def test_an_agent_is_never_root(make: Make) -> None:
    node = launch(make())
    eventually(says(node, "uid"))
    assert int(word_after(node, "uid")) != 0


@pytest.mark.case("D01")
@pytest.mark.parametrize(("given", "bytes_"), [({}, 1024 * MIB), ({"shm_gib": 0.0625}, 64 * MIB)])
def test_shared_memory_is_a_gibibyte_unless_told_otherwise(
    make: Make, given: dict[str, float], bytes_: int
) -> None:
    node = launch(make(**given))
    eventually(says(node, "shm"))
    assert int(word_after(node, "shm")) == bytes_


def test_secrets_of_the_flow_are_nowhere_in_what_the_engine_knows(
    make: Make, docker_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_SECRET_ACCESS_KEY", "PREFECT_API_KEY", "ETCD_PASSWORD"):
        monkeypatch.setenv(name, "canary-of-the-mine")
    launch(make())
    assert "canary-of-the-mine" not in json.dumps(container(docker_client).attrs)


def test_data_are_mounted_where_the_pool_says_and_cannot_be_written(
    make: Make, docker_client: Any, tmp_path: Path
) -> None:
    (tmp_path / "data").mkdir()
    launch(make(mounts=(DirectoryMount(source=str(tmp_path / "data"), target="/data"),)))
    mounts = {mount["Destination"]: mount for mount in container(docker_client).attrs["Mounts"]}
    assert (mounts["/data"]["Source"], mounts["/data"]["RW"]) == (str(tmp_path / "data"), False)
    assert mounts[str(tmp_path / RUN)]["RW"]


# ---- how it ends -------------------------------------------------------------------------------


@pytest.mark.case("G09")
def test_sigterm_reaches_the_agent_at_once_and_its_exit_code_is_the_containers(
    make: Make, docker_client: Any
) -> None:
    provider = make()
    node = launch(provider)
    eventually(says(node, "name"))
    asked_at = time.time()
    container(docker_client).kill(signal.SIGTERM)
    eventually(ended(provider))
    eventually(says(node, "sigterm"))
    assert float(word_after(node, "sigterm")) - asked_at < 1.0
    assert provider.list_nodes(RUN)[0].exit_code == 75


@pytest.mark.case("D02")
def test_out_of_memory_is_told_with_the_limit(make: Make) -> None:
    provider = make(memory_gib=64 / 1024)
    launch(provider, "--eat", "200")
    eventually(ended(provider))
    node = provider.list_nodes(RUN)[0]
    assert (node.exit_code, node.detail) == (137, "container memory limit 64 MiB reached")


@pytest.mark.case("D02")
def test_a_kill_is_not_called_out_of_memory(make: Make) -> None:
    provider = make(memory_gib=64 / 1024)
    launch(provider)
    provider.kill(RUN, "node-1")
    eventually(ended(provider))
    node = provider.list_nodes(RUN)[0]
    assert (node.exit_code, node.detail) == (137, "killed (137)")


@pytest.mark.case("D05")
def test_orphans_of_workers_are_reaped(make: Make, docker_client: Any) -> None:
    node = launch(make(), "--orphans", "200")
    eventually(says(node, "orphans left"))
    subject = container(docker_client)

    def states() -> list[str]:
        return [row[0] for row in subject.top(ps_args="-o stat,pid")["Processes"]]

    eventually(lambda: len(states()) == 2, timeout_s=10)  # the init process and the agent
    assert [state for state in states() if state.startswith("Z")] == []


def test_exit_causes_are_known_after_the_container_was_removed(make: Make, docker_client: Any) -> None:
    provider = make(memory_gib=64 / 1024)
    launch(provider, "--eat", "200")
    eventually(ended(provider))
    provider.teardown(RUN)
    assert left_of(docker_client, RUN) == []
    assert provider.list_nodes(RUN)[0].detail == "container memory limit 64 MiB reached"


# ---- logs --------------------------------------------------------------------------------------


@pytest.mark.case("L06")
def test_a_followed_log_survives_rotation_and_ends_with_the_last_line(make: Make) -> None:
    provider = make()
    node = launch(provider, "--say", "20000", "--exit", "0")  # 20 MB: rotated twice
    eventually(ended(provider), timeout_s=60)
    provider.teardown(RUN)
    lines = Path(node.log).read_text().splitlines()
    assert lines[-1] == "said all"
    numbers = [int(line.split()[1]) for line in lines if line.startswith("line")]
    assert numbers == sorted(set(numbers))  # the engine may skip within a burst, but nothing comes twice


def test_another_flow_goes_on_copying_where_the_first_one_ended(make: Make, docker_client: Any) -> None:
    provider = make()
    node = launch(provider, "--say", "10")
    eventually(says(node, "said all"))
    first = Path(node.log).read_text()
    make().list_nodes(RUN)  # another process's provider: it adopts
    container(docker_client).kill(signal.SIGTERM)
    eventually(says(node, "sigterm"))
    provider.teardown(RUN)
    assert Path(node.log).read_text().startswith(first)
    assert Path(node.log).read_text().count("said all") == 1


# ---- what is in the way ------------------------------------------------------------------------


@pytest.mark.case("D04")
def test_a_container_whose_create_was_not_answered_is_adopted(make: Make, docker_client: Any) -> None:
    provider = make()
    launch(provider)
    before = container(docker_client).id
    assert launch(make()).name == "node-1"
    assert container(docker_client).id == before


@pytest.mark.case("D04")
def test_a_strangers_container_of_our_name_is_left_alone_and_named(
    make: Make, docker_client: Any, stub_image: str
) -> None:
    stranger = docker_client.containers.create(stub_image, name=f"elastic-{RUN}-node-1")
    try:
        with pytest.raises(InvalidRequest, match=f"elastic-{RUN}-node-1 exists and is not ours: remove it"):
            launch(make())
        assert container(docker_client).id == stranger.id
    finally:
        stranger.remove(force=True)


@pytest.mark.case("D06")
def test_an_image_that_is_nowhere_is_one_clear_line_before_anything_is_made(
    make: Make, docker_client: Any
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        launch(make(image=ABSENT))
    assert str(raised.value).startswith(f"pool.image: {ABSENT!r} is not on this machine and no registry has")
    assert "\n" not in str(raised.value)
    assert left_of(docker_client, RUN) == []


def test_a_container_that_cannot_start_does_not_stay_to_be_awaited(make: Make, docker_client: Any) -> None:
    with pytest.raises(ProviderError, match="gpu"):
        launch(make(gpus=1))
    assert docker_engine.containers_of(docker_client, RUN) == []


@pytest.mark.case("D07")
def test_teardown_goes_on_after_a_container_that_cannot_be_removed_and_names_it(
    make: Make, docker_client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider = make()
    launch(provider, count=3)
    remove = Container.remove

    def stubborn(self: Any, **options: Any) -> None:
        if self.name.endswith("node-2"):
            raise APIError("500", explanation="driver failed to remove root filesystem")
        remove(self, **options)

    monkeypatch.setattr(Container, "remove", stubborn)
    with pytest.raises(SurvivingContainers) as raised:
        provider.teardown(RUN)
    told = f"1 container(s) could not be removed: elastic-{RUN}-node-2: driver failed to remove"
    assert str(raised.value).startswith(told)
    survivors = [found.name for found in docker_engine.containers_of(docker_client, RUN)]
    assert survivors == [f"elastic-{RUN}-node-2"]
    monkeypatch.undo()
    provider.teardown(RUN)
    assert left_of(docker_client, RUN) == []
