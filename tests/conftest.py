"""Fixtures for every test that needs a real store; a machine without etcd fails them, it skips none."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.store.etcd import EtcdStore
from elastic_core.store.server import EtcdOptions, EtcdServer


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
