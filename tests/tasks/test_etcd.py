"""A run's etcd outlives its starter, comes back with its data, and is ended wherever it came from."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.errors import ElasticError
from tasks.etcd import EtcdProcess, connected, discard_data
from tasks.process import wait_ended
from tasks.runs import RunDirectory


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    made = RunDirectory(tmp_path / "digits-1")
    made.path.mkdir()
    (made.path / "attempt").write_text("1")
    yield made
    EtcdProcess(made).stop()


def test_another_process_finds_the_running_server(directory: RunDirectory) -> None:
    started = EtcdProcess(directory).start(1)
    assert EtcdProcess(directory).ensure() == started


def test_a_killed_server_comes_back_with_its_data_and_its_address(directory: RunDirectory) -> None:
    etcd = EtcdProcess(directory)
    first = etcd.start(1)
    with connected(first.endpoint) as store:
        store.put("/elastic/x", b"kept")
    os.kill(first.process.pid, signal.SIGKILL)
    wait_ended([first.process], 5)
    assert not etcd.is_running()
    again = etcd.ensure()
    assert (again.endpoint, again.process == first.process) == (first.endpoint, False)
    with connected(again.endpoint) as store:
        entry = store.read("/elastic/x")
    assert entry is not None
    assert entry.value == b"kept"


def test_a_new_attempt_ends_the_server_before_and_knows_nothing_of_it(directory: RunDirectory) -> None:
    etcd = EtcdProcess(directory)
    first = etcd.start(1)
    with connected(first.endpoint) as store:
        store.put("/elastic/x", b"old")
    second = EtcdProcess(directory).start(2)
    assert wait_ended([first.process], 0) == set()
    with connected(second.endpoint) as store:
        assert store.read("/elastic/x") is None
    (directory.path / "attempt").write_text("2")


def test_a_server_whose_starter_died_before_it_wrote_the_record_is_ended_too(directory: RunDirectory) -> None:
    record = EtcdProcess(directory).start(1)
    (directory.path / "etcd.json").unlink()
    EtcdProcess(directory).stop()
    assert wait_ended([record.process], 0) == set()


def test_data_of_ended_servers_are_removed_and_their_log_stays(directory: RunDirectory) -> None:
    etcd = EtcdProcess(directory)
    etcd.start(1)
    etcd.stop()
    discard_data(directory)
    assert [path.name for path in (directory.path / "etcd-1").iterdir()] == ["etcd.log"]


def test_without_a_record_there_is_nothing_to_ensure(directory: RunDirectory) -> None:
    with pytest.raises(ElasticError, match="run digits-1 has no etcd on record"):
        EtcdProcess(directory).ensure()
