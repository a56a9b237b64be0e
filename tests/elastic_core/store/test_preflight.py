"""Each way to be wrong about an endpoint has a line of its own (case E11)."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import TlsFiles
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.preflight import check_endpoint
from elastic_core.store.server import EtcdOptions, EtcdServer
from elastic_core.testing.freeze import frozen
from tests.elastic_core.store.certificates import Authority


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "authority")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "stranger")


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.issue("127.0.0.1")


@pytest.fixture(scope="module")
def secure(files: TlsFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    options = EtcdOptions(fast_election=True, ends_with_parent=True, tls=files)
    with EtcdServer(tmp_path_factory.mktemp("etcd"), options) as server:
        yield server.endpoint


def problem_of(endpoint: str, *, tls: TlsFiles | None = None) -> str:
    with pytest.raises(RefusedInput) as caught:
        check_endpoint(endpoint, tls=tls, timeout_s=0.5)
    (line,) = caught.value.problems
    assert line.startswith(f"endpoint {endpoint}: ")
    return line


def test_an_endpoint_that_answers_passes_in_plaintext_and_in_tls(
    etcd_endpoint: str, secure: str, files: TlsFiles
) -> None:
    check_endpoint(etcd_endpoint)
    check_endpoint(secure, tls=files)


def test_what_passes_can_be_used(secure: str, files: TlsFiles) -> None:
    with contextlib.closing(EtcdStore(secure, tls=files)) as store:
        revision = store.put("/a", b"1")
        entry = store.read("/a")
    assert entry is not None
    assert entry.modified == revision


def test_one_good_endpoint_of_several_is_enough(etcd_endpoint: str) -> None:
    check_endpoint(f"127.0.0.1:1,{etcd_endpoint}", timeout_s=0.5)


def test_a_name_that_does_not_resolve() -> None:
    assert "the name does not resolve" in problem_of("no-such-host.invalid:2379")


@pytest.mark.case("E11")
def test_a_refused_port() -> None:
    assert "connection refused" in problem_of("127.0.0.1:1")


def test_an_address_that_drops_what_it_gets() -> None:
    with socket.socket() as full, contextlib.ExitStack() as stack:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # once its queue is full, the kernel drops further connections
        for _ in range(4):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        assert "no answer within 0.5 s" in problem_of(f"127.0.0.1:{full.getsockname()[1]}")


def test_a_frozen_server(etcd_server: EtcdServer) -> None:
    with frozen(etcd_server.pid):
        assert "is the server frozen?" in problem_of(etcd_server.endpoint)


@pytest.mark.case("E11")
def test_plaintext_to_a_tls_port(secure: str) -> None:
    assert "the server speaks TLS; give the CA's file" in problem_of(secure)


def test_tls_to_a_plaintext_port(etcd_endpoint: str, files: TlsFiles) -> None:
    assert "the server speaks plaintext; give no TLS files" in problem_of(etcd_endpoint, tls=files)


@pytest.mark.case("E11")
def test_a_certificate_of_another_authority(secure: str, files: TlsFiles, stranger: Authority) -> None:
    line = problem_of(secure, tls=replace(files, ca=stranger.certificate))
    assert f"does not come from the CA in {str(stranger.certificate)!r}" in line


def test_no_client_certificate_where_one_is_wanted(secure: str, files: TlsFiles) -> None:
    assert "wants another client certificate" in problem_of(secure, tls=TlsFiles(ca=files.ca))


def test_a_client_certificate_of_another_authority(secure: str, files: TlsFiles, stranger: Authority) -> None:
    line = problem_of(secure, tls=replace(stranger.issue("client"), ca=files.ca))
    assert "client certificate" in line


def test_a_file_that_is_no_certificate(secure: str, tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    assert "the TLS files cannot be used" in problem_of(secure, tls=TlsFiles(ca=tmp_path / "ca.pem"))


@pytest.mark.case("E11")
@pytest.mark.parametrize(
    ("name", "days", "expected"),
    [
        ("etcd.internal", 1, "certificate is for another name than '127.0.0.1'"),
        ("127.0.0.1", -1, "certificate is out of date"),
    ],
)
def test_a_certificate_with_the_wrong_name_or_date(
    authority: Authority, tmp_path: Path, name: str, days: int, expected: str
) -> None:
    server_files = authority.issue(name, days=days)
    with tls_listener(server_files) as endpoint:
        assert expected in problem_of(endpoint, tls=TlsFiles(ca=authority.certificate))


def test_something_else_than_etcd() -> None:
    with listener(lambda connection: connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")) as endpoint:
        assert "something answers, but not etcd" in problem_of(endpoint)


@contextlib.contextmanager
def listener(answer: Callable[[socket.socket], object]) -> Iterator[str]:
    """One server that treats each connection with `answer`."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(2)
                    answer(connection)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join(3)


@contextlib.contextmanager
def tls_listener(files: TlsFiles) -> Iterator[str]:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(str(files.cert), str(files.key))

    def shake_hands(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True):
            pass

    with listener(shake_hands) as endpoint:
        yield endpoint
