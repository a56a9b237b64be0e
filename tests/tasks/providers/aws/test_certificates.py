"""Who may speak to a run's etcd: those who hold the attempt's certificates."""

import contextlib
import stat
from datetime import timedelta
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import TlsFiles
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.preflight import check_endpoint
from elastic_core.store.server import EtcdOptions, EtcdServer
from tasks.providers.aws import certificates

HOUR = timedelta(hours=1)


def issued(directory: Path, address: str = "127.0.0.1") -> tuple[TlsFiles, TlsFiles]:
    certificates.issue(directory, address=address, lifetime=HOUR)
    client = certificates.client_files(directory)
    return client, TlsFiles(ca=client.ca, cert=directory / "server.pem", key=directory / "server.key")


def test_a_server_and_its_clients_know_each_other(tmp_path: Path) -> None:
    client, server = issued(tmp_path / "tls")
    options = EtcdOptions(fast_election=True, ends_with_parent=True, tls=server)
    with (
        EtcdServer(tmp_path / "etcd", options) as etcd,
        contextlib.closing(EtcdStore(etcd.endpoint, tls=client)) as store,
    ):
        store.put("/a", b"1")
        entry = store.read("/a")
        assert entry is not None
        assert entry.value == b"1"


@pytest.mark.case("E11")
def test_another_attempts_certificate_is_refused_and_told_apart(tmp_path: Path) -> None:
    client, server = issued(tmp_path / "one")
    stranger, _ = issued(tmp_path / "two")
    mixed = TlsFiles(ca=client.ca, cert=stranger.cert, key=stranger.key)
    options = EtcdOptions(fast_election=True, ends_with_parent=True, tls=server)
    with EtcdServer(tmp_path / "etcd", options) as etcd:
        with pytest.raises(RefusedInput, match="does not come from the CA"):
            check_endpoint(etcd.endpoint, tls=stranger)
        with pytest.raises(RefusedInput, match="client certificate"):
            check_endpoint(etcd.endpoint, tls=mixed)
        with pytest.raises(RefusedInput, match="speaks TLS"):
            check_endpoint(etcd.endpoint)


def test_keys_are_their_owners_alone(tmp_path: Path) -> None:
    issued(tmp_path / "tls")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()}
    assert set(modes.values()) == {0o600}
    assert sorted(modes) == ["ca.pem", "client.key", "client.pem", "server.key", "server.pem"]


def test_the_authoritys_key_is_not_kept(tmp_path: Path) -> None:
    issued(tmp_path / "tls")
    keys = [path for path in (tmp_path / "tls").iterdir() if "PRIVATE KEY" in path.read_text()]
    assert sorted(path.name for path in keys) == ["client.key", "server.key"]
