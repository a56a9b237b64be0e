from __future__ import annotations

from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import Credentials, Endpoint, TlsFiles, parse_endpoints


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("etcd", [("etcd", 2379)]),
        ("etcd:1234", [("etcd", 1234)]),
        (" a:1 , b ", [("a", 1), ("b", 2379)]),
        ("[::1]:2380", [("::1", 2380)]),
        ("[::1]", [("::1", 2379)]),
        ("fe80::1", [("fe80::1", 2379)]),
    ],
)
def test_endpoints_are_hosts_with_a_default_port(text: str, expected: list[tuple[str, int]]) -> None:
    assert parse_endpoints(text) == tuple(Endpoint(host, port) for host, port in expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "is empty"),
        ("a,,b", "is empty"),
        ("http://etcd:2379", "has a scheme"),
        (":2379", "has no valid host"),
        ("et cd:2379", "has no valid host"),
        ("etcd:port", "port 'port' is not a number"),
        ("etcd:0", "port '0' is not a number from 1"),
        ("etcd:65536", "port '65536' is not a number from 1 to 65535"),
        ("a:b:c", "has more than one colon"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_its_remedy(text: str, problem: str) -> None:
    with pytest.raises(RefusedInput, match=problem):
        parse_endpoints(text)


def test_every_bad_endpoint_has_a_line() -> None:
    with pytest.raises(RefusedInput) as caught:
        parse_endpoints("good:1,http://x,a:x")
    assert len(caught.value.problems) == 2


def test_an_ipv6_endpoint_is_written_with_brackets() -> None:
    assert str(Endpoint("::1", 2379)) == "[::1]:2379"


@pytest.mark.parametrize(
    ("host", "expected"),
    [("localhost", True), ("127.0.0.9", True), ("::1", True), ("10.0.0.1", False), ("etcd", False)],
)
def test_loopback_is_known_by_name_and_address(host: str, expected: bool) -> None:
    assert Endpoint(host).is_loopback is expected


def test_missing_tls_files_are_all_named(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").touch()
    with pytest.raises(RefusedInput) as caught:
        TlsFiles(ca=tmp_path / "none.pem", cert=tmp_path / "ca.pem")
    assert [line.split(":")[0] for line in caught.value.problems] == [
        f"TLS file {str(tmp_path / 'none.pem')!r} cannot be read",
        "TLS",
    ]


def test_a_password_is_not_shown() -> None:
    assert "secret" not in repr(Credentials("root", "secret"))
