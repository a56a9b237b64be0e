"""Fixtures for every test that needs a real store; a machine without etcd fails them, it skips none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from elastic_core.store.endpoint import Credentials, TlsFiles
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.server import EtcdOptions, EtcdServer
from elastic_core.testing.etcd_cluster import EtcdCluster
from elastic_core.testing.etcd_console import EtcdConsole
from tests.elastic_core.store.certificates import Authority


@pytest.fixture(scope="session")
def etcd_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One etcd for the whole session, as "host:port"; use a run or prefix of your own on it."""
    options = EtcdOptions(fast_election=True, ends_with_parent=True)
    with EtcdServer(tmp_path_factory.mktemp("etcd"), options) as server:
        yield server.endpoint


@pytest.fixture
def store(etcd_endpoint: str) -> Iterator[EtcdStore]:
    """A client of the session's etcd."""
    with contextlib.closing(EtcdStore(etcd_endpoint)) as client:
        yield client


@pytest.fixture
def etcd_server(tmp_path: Path) -> Iterator[EtcdServer]:
    """An etcd of the test's own, to be killed, frozen and started again."""
    options = EtcdOptions(fast_election=True, ends_with_parent=True)
    with EtcdServer(tmp_path / "etcd", options) as server:
        yield server


@dataclass(frozen=True, slots=True)
class GuardedEtcd:
    """An etcd that wants TLS, a client's certificate and a user, who may use `/contract/` and `/elastic/`."""

    endpoint: str
    tls: TlsFiles
    credentials: Credentials

    def connect(self) -> EtcdStore:
        """Return a client."""
        return EtcdStore(self.endpoint, tls=self.tls, credentials=self.credentials)


@pytest.fixture(scope="session")
def guarded_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GuardedEtcd]:
    """One guarded etcd for the whole session, whose tokens end after two seconds without use."""
    tls = Authority(tmp_path_factory.mktemp("tls") / "authority").issue("127.0.0.1")
    options = EtcdOptions(fast_election=True, ends_with_parent=True, tls=tls, token_ttl_s=2)
    with EtcdServer(tmp_path_factory.mktemp("guarded"), options) as server:
        passwords = {"root": "r00t", "contract": "s3cret"}
        console = EtcdConsole(server.endpoint, tls=tls)
        console.set_up_users({"contract": ("/contract/", "/elastic/")}, passwords)
        yield GuardedEtcd(server.endpoint, tls, Credentials("contract", "s3cret"))


@pytest.fixture(scope="session")
def etcd_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Three members for the whole session; not to be disturbed."""
    with EtcdCluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster
