"""A run on Docker: its etcd is found, comes back and goes; whatever breaks, nothing stays."""

import errno
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from docker.api.client import APIClient
from requests.exceptions import ConnectionError as NoAnswer

from elastic_core.cluster.provider import InstanceState
from elastic_core.errors import ProviderUnavailable
from elastic_core.model.job import DockerPool, JobSpec, LocalPool
from elastic_core.store.endpoint import parse_endpoints
from tasks.etcd import NoEtcd, connected
from tasks.providers.docker_engine import network_of
from tasks.providers.docker_etcd import EtcdContainer
from tasks.provision import Cluster
from tasks.runs import RunDirectory, choose_run
from tests.docker.engine import RUN, left_of

pytestmark = [pytest.mark.docker, pytest.mark.slow]

POSTS = 7
"""Network, etcd (create, start), two nodes (create, start each): every call that makes something."""


@pytest.fixture
def pool(stub_image: str) -> DockerPool:
    return DockerPool(image=stub_image, shm_gib=0.0625)


@pytest.fixture
def directory(tmp_path: Path, pool: DockerPool, docker_client: Any) -> Iterator[RunDirectory]:
    made = choose_run(tmp_path, JobSpec(pool=pool), run_id=RUN, now=datetime.now(UTC))
    yield made
    Cluster(JobSpec(pool=pool), made).tear_down()
    assert left_of(docker_client, made.run) == []


def container_of(client: Any, directory: RunDirectory) -> Any:
    return client.containers.get(f"elastic-{directory.run}-etcd")


# ---- etcd --------------------------------------------------------------------------------------


def test_another_process_finds_the_running_server(directory: RunDirectory, pool: DockerPool) -> None:
    started = EtcdContainer(directory, pool).start(1)
    assert EtcdContainer(directory, pool).ensure() == started


@pytest.mark.parametrize("end", ["kill", "remove"])
def test_a_lost_server_comes_back_with_its_data_and_its_address(
    directory: RunDirectory, pool: DockerPool, docker_client: Any, end: str
) -> None:
    etcd = EtcdContainer(directory, pool)
    first = etcd.start(1)
    with connected(first.endpoint) as store:
        store.put("/elastic/x", b"kept")
    lost = container_of(docker_client, directory)
    lost.kill() if end == "kill" else lost.remove(force=True)
    assert not etcd.is_running()
    assert EtcdContainer(directory, pool).ensure() == first
    with connected(first.endpoint) as store:
        entry = store.read("/elastic/x")
    assert entry is not None
    assert entry.value == b"kept"


def test_a_new_attempt_knows_nothing_of_the_one_before(directory: RunDirectory, pool: DockerPool) -> None:
    etcd = EtcdContainer(directory, pool)
    with connected(etcd.start(1).endpoint) as store:
        store.put("/elastic/x", b"old")
    with connected(etcd.start(2).endpoint) as store:
        assert store.read("/elastic/x") is None


def test_a_server_whose_starter_died_before_it_wrote_the_record_is_removed_too(
    directory: RunDirectory, pool: DockerPool, docker_client: Any
) -> None:
    EtcdContainer(directory, pool).start(1)
    (directory.path / "etcd-container.json").unlink()
    EtcdContainer(directory, pool).stop()
    assert left_of(docker_client, directory.run) == [
        network_of(docker_client, directory.run, directory.path.parent)
    ]


def test_nodes_reach_it_by_name_and_nobody_outside_this_machine_does(
    directory: RunDirectory, pool: DockerPool, docker_client: Any
) -> None:
    record = EtcdContainer(directory, pool).start(1)
    config = container_of(docker_client, directory).attrs
    published = config["HostConfig"]["PortBindings"]
    port = str(parse_endpoints(record.endpoint)[0].port)
    assert published == {"2379/tcp": [{"HostIp": "127.0.0.1", "HostPort": port}]}
    network = network_of(docker_client, directory.run, directory.path.parent)
    assert "etcd" in config["NetworkSettings"]["Networks"][network]["Aliases"]
    assert record.node_endpoint == "etcd:2379"


def test_a_server_that_cannot_run_says_why(directory: RunDirectory, pool: DockerPool) -> None:
    data = directory.path / "etcd-1" / "data"
    data.mkdir(parents=True)
    (data / "member").write_text("not a directory")
    with pytest.raises(NoEtcd) as raised:
        EtcdContainer(directory, pool).start(1)
    assert str(raised.value) == (
        "etcd ended right after its start: failed to create snapshot directory: "
        f"mkdir {data}/member: not a directory"
    )


def test_an_attempt_on_another_pool_ends_what_was_left_here(
    directory: RunDirectory, pool: DockerPool, docker_client: Any
) -> None:
    make(JobSpec(pool=pool), directory)
    elsewhere = Cluster(JobSpec(pool=LocalPool()), directory)
    try:
        assert elsewhere.find_or_start() == f"attempt 2 of run {RUN} begins"
        assert left_of(docker_client, directory.run) == []
    finally:
        elsewhere.tear_down()


# ---- faults ------------------------------------------------------------------------------------


class Killed(BaseException):
    """The flow's process ends here."""


class Fault:
    """Breaks the k-th call that makes something: before it arrives, after it, or with the whole process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str, k: int) -> None:
        self.calls = 0
        self._mode = mode
        self._k = k
        self._post = APIClient._post
        self._patch = monkeypatch
        monkeypatch.setattr(APIClient, "_post", lambda api, url, **options: self.post(api, url, **options))

    def post(self, api: Any, url: str, **options: Any) -> Any:
        if not url.endswith(("/create", "/start")):
            return self._post(api, url, **options)
        self.calls += 1
        if self.calls != self._k:
            return self._post(api, url, **options)
        if self._mode == "refused":
            raise NoAnswer(errno.ECONNREFUSED, "connection refused")
        answer = self._post(api, url, **options)
        if self._mode == "killed":
            raise Killed
        assert answer.ok
        raise NoAnswer(errno.ECONNRESET, "connection reset by peer")

    def mend(self) -> None:
        self._patch.undo()


def make(job: JobSpec, directory: RunDirectory, token: str = "first") -> Cluster:
    cluster = Cluster(job, directory)
    cluster.find_or_start()
    cluster.launch(token, 2)
    return cluster


@pytest.mark.parametrize("k", range(1, POSTS + 1))
@pytest.mark.parametrize("mode", ["refused", "lost reply", "killed"])
def test_whatever_call_breaks_nothing_is_left_and_a_rerun_succeeds(
    directory: RunDirectory,
    pool: DockerPool,
    docker_client: Any,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    k: int,
) -> None:
    job = JobSpec(pool=pool)
    fault = Fault(monkeypatch, mode, k)
    with pytest.raises((ProviderUnavailable, Killed)):
        make(job, directory)
    assert fault.calls == k
    fault.mend()
    Cluster(job, directory).tear_down()
    assert left_of(docker_client, directory.run) == []
    assert len(make(job, directory, "second").alive()) == 2


@pytest.mark.parametrize("k", range(4, POSTS + 1))
@pytest.mark.parametrize("mode", ["refused", "lost reply"])
def test_the_same_token_again_makes_only_what_is_missing(
    directory: RunDirectory, pool: DockerPool, monkeypatch: pytest.MonkeyPatch, mode: str, k: int
) -> None:
    cluster = Cluster(JobSpec(pool=pool), directory)
    fault = Fault(monkeypatch, mode, k)
    cluster.find_or_start()
    with pytest.raises(ProviderUnavailable):
        cluster.launch("first", 2)
    fault.mend()
    result = cluster.launch("first", 2)
    told = [(node.name, node.state) for node in result.launched]
    assert told == [("node-1", InstanceState.RUNNING), ("node-2", InstanceState.RUNNING)]
    assert len(cluster.instances()) == 2


def test_nothing_more_than_the_counted_calls_makes_things(
    directory: RunDirectory, pool: DockerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault(monkeypatch, "refused", 0)
    make(JobSpec(pool=pool), directory)
    assert fault.calls == POSTS
