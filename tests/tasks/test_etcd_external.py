"""A run on somebody else's etcd: its own keys only, nobody's in its way, and nothing left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import DockerPool, EtcdSource, JobSpec, ScriptTraining
from elastic_core.model.job_file import parse_job
from elastic_core.store.etcd import EtcdStore
from tasks import etcd_external
from tasks.agents import Attempt, etcd_of
from tasks.etcd import connected
from tasks.etcd_external import ExternalEtcd, check_source
from tasks.runs import RunDirectory
from tasks.validate import resolve
from tests.conftest import GuardedEtcd


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / f"shared-{tmp_path.name.replace('_', '-')[:40].strip('-')}".lower())
    made.path.mkdir()
    return made


@pytest.fixture
def source(etcd_endpoint: str) -> EtcdSource:
    return EtcdSource(endpoints=etcd_endpoint)


@pytest.fixture
def prefix(directory: RunDirectory) -> str:
    return f"/elastic/{directory.run}/"


def job_on(source: EtcdSource, **fields: Any) -> JobSpec:
    return JobSpec(etcd=source, training=ScriptTraining(script="train.py"), **fields)


def test_an_attempt_begins_without_what_an_earlier_one_closed_and_ends_without_a_key(
    directory: RunDirectory, source: EtcdSource, store: EtcdStore, prefix: str
) -> None:
    store.put(f"{prefix}closed", b"old")
    store.put(f"{prefix[:-1]}0/closed", b"another run's")
    etcd = etcd_of(job_on(source), directory)
    record = etcd.start(2)
    assert (record.attempt, record.endpoint, record.node_endpoint) == (2, source.endpoints, source.endpoints)
    assert store.read(f"{prefix}closed") is None
    with connected(record.endpoint, source) as client:
        client.put(f"{prefix}target", b"new")
    assert (etcd.is_running(), etcd.ensure()) == (True, record)
    etcd.stop()
    etcd.stop()
    assert store.read_prefix(prefix).entries == ()
    assert store.read(f"{prefix[:-1]}0/closed") is not None
    assert (etcd.is_running(), etcd.record()) == (False, None)


def test_a_name_that_somebody_uses_there_is_refused_and_their_keys_stay(
    directory: RunDirectory,
    source: EtcdSource,
    store: EtcdStore,
    prefix: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(etcd_external, "LEFTOVERS_S", 0.0)
    lease = store.grant(60)
    store.put(f"{prefix}nodes/node-1.1", b"theirs", lease)
    with pytest.raises(RefusedInput, match=r"is in use on the etcd at .*nodes/node-1\.1.*another name"):
        ExternalEtcd(directory, source).start(1)
    assert store.read(f"{prefix}nodes/node-1.1") is not None
    store.revoke(lease)
    assert ExternalEtcd(directory, source).start(1).attempt == 1


def test_leases_of_an_earlier_attempts_nodes_are_waited_for(
    directory: RunDirectory, source: EtcdSource, store: EtcdStore, prefix: str
) -> None:
    store.put(f"{prefix}owner", b"killed", store.grant(1))
    assert ExternalEtcd(directory, source).start(2).attempt == 2
    assert store.read(f"{prefix}owner") is None


@pytest.mark.slow
def test_a_guarded_etcd_is_entered_by_files_and_a_password_that_no_flag_and_no_record_shows(
    directory: RunDirectory, guarded_etcd: GuardedEtcd, tmp_path: Path
) -> None:
    source = guarded_source(guarded_etcd, tmp_path)
    job = job_on(source)
    check_source(job)
    etcd = etcd_of(job, directory)
    record = etcd.start(1)
    with connected(record.endpoint, source) as store:
        store.put(f"/elastic/{directory.run}/target", b"")
    attempt = Attempt(job=job, directory=directory, number=1, endpoint=record.node_endpoint, etcd=job.etcd)
    request = attempt.launch_request("t", 1)
    assert f"--etcd-ca={guarded_etcd.tls.ca}" in request.command
    assert f"--etcd-user={guarded_etcd.credentials.user}" in request.command
    everything = " ".join([*request.command, *request.environment.values()])
    everything += "".join(path.read_text() for path in directory.path.glob("*.json"))
    assert guarded_etcd.credentials.password not in everything
    etcd.stop()


def guarded_source(guarded: GuardedEtcd, directory: Path) -> EtcdSource:
    (directory / "password").write_text(guarded.credentials.password + "\n")
    tls = guarded.tls
    return EtcdSource.model_validate(
        {
            "endpoints": guarded.endpoint,
            "tls": {"ca": str(tls.ca), "cert": str(tls.cert), "key": str(tls.key)},
            "user": guarded.credentials.user,
            "password_file": str(directory / "password"),
        }
    )


def test_files_are_named_absolutely_and_seen_by_containers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    source = EtcdSource.model_validate(
        {"endpoints": "etcd:2379", "tls": {"ca": "tls/ca.pem"}, "user": "me", "password_file": "tls/secret"}
    )
    job = resolve(job_on(source, pool=DockerPool()))
    assert (job.etcd.tls.ca, job.etcd.password_file) == (
        str(tmp_path / "tls/ca.pem"),
        str(tmp_path / "tls/secret"),
    )
    assert isinstance(job.pool, DockerPool)
    assert str(tmp_path / "tls") in [mount.source for mount in job.pool.mounts]


@pytest.mark.parametrize(
    ("etcd", "said"),
    [
        ({"user": "me"}, "etcd: user is given, but no endpoints: the run's own etcd asks for nothing"),
        ({"endpoints": "e", "tls": {"cert": "a"}}, "etcd.tls: give certificate and key, or neither"),
        ({"endpoints": "e", "tls": {"cert": "a", "key": "b"}}, "etcd.tls: a certificate needs TLS"),
        ({"endpoints": "e", "password_file": "p"}, "etcd: password_file is given, but no user"),
    ],
)
def test_half_an_etcd_is_refused_with_its_field(etcd: dict[str, Any], said: str) -> None:
    with pytest.raises(RefusedInput) as refused:
        parse_job({"etcd": etcd}, "job.yaml")
    assert said in "\n".join(refused.value.problems)


@pytest.mark.parametrize(
    ("etcd", "said"),
    [
        ({"endpoints": "http://e"}, "etcd.endpoints: endpoint 'http://e': has a scheme"),
        ({"endpoints": "127.0.0.1:1"}, "etcd.endpoints: endpoint 127.0.0.1:1: connection refused"),
        (
            {"endpoints": "e", "tls": {"ca": "/none.pem"}},
            "etcd.endpoints: TLS file '/none.pem' cannot be read",
        ),
        ({"endpoints": "e", "user": "me"}, "etcd.user: 'me' has no password; set ELASTIC_STORE_PASSWORD"),
        ({"endpoints": "e", "user": "me", "password_file": "/none"}, "etcd.password_file: '/none' cannot be"),
    ],
)
def test_an_etcd_that_could_not_be_entered_is_refused_before_anything_starts(
    etcd: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ELASTIC_STORE_PASSWORD", raising=False)
    with pytest.raises(RefusedInput) as refused:
        check_source(job_on(EtcdSource.model_validate(etcd)))
    assert refused.value.problems[0].startswith(said)


def test_containers_need_the_password_in_a_file(etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ELASTIC_STORE_PASSWORD", "s3cret")
    source = EtcdSource(endpoints=etcd_endpoint, user="me")
    check_source(job_on(source))
    with pytest.raises(RefusedInput, match=r"etcd\.password_file: containers do not see"):
        check_source(job_on(source, pool=DockerPool()))


@pytest.fixture(autouse=True)
def _nothing_is_left(directory: RunDirectory, store: EtcdStore) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.callback(store.delete, f"/elastic/{directory.run}/", prefix=True)
        yield
