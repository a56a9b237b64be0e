from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import structlog
from torch.distributed.elastic.rendezvous.api import RendezvousConnectionError, RendezvousParameters

from elastic_core.torchrun.options import create_handler, run_name


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def parameters(endpoint: str, **config: str) -> RendezvousParameters:
    return RendezvousParameters("etcd3", endpoint, "run-1", 1, 2, local_addr="127.0.0.1", **config)


def test_torch_finds_the_plug_in_by_its_entry_point() -> None:
    (entry,) = entry_points(group="torchrun.handlers", name="etcd3")
    assert entry.load()() is create_handler


def test_a_handler_is_made_from_torchruns_options(etcd_endpoint: str) -> None:
    handler = create_handler(parameters(etcd_endpoint, ttl="3", timeout="900"))
    assert (handler.get_backend(), handler.get_run_id()) == ("etcd3", "run-1")
    assert handler.is_closed() is False
    assert handler.shutdown() is True


@pytest.mark.parametrize(
    ("endpoint", "config", "problem"),
    [
        ("", {}, "--rdzv-endpoint is empty"),
        ("http://etcd", {}, "has a scheme"),
        ("127.0.0.1:1", {"tll": "3"}, r"unknown key 'tll' \(did you mean 'ttl'\?\)"),
        ("127.0.0.1:1", {"ttl": "soon"}, "ttl=soon is not a number of seconds above 0"),
        ("127.0.0.1:1", {"join_timeout": "-1"}, "join_timeout=-1 is not a number"),
        ("127.0.0.1:1", {"cert": "a", "key": "b"}, "cert and key need ca"),
        ("127.0.0.1:1", {"ca": "/none.pem"}, "TLS file '/none.pem' cannot be read"),
    ],
)
def test_a_wrong_option_is_refused_with_its_remedy(
    endpoint: str, config: dict[str, str], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        create_handler(parameters(endpoint, **config))


def test_all_wrong_keys_have_a_line() -> None:
    with pytest.raises(ValueError, match=r"'a'[^\n]*\n[^\n]*'b'"):
        create_handler(parameters("127.0.0.1:1", a="1", b="2"))


def test_a_store_that_cannot_be_reached_says_why() -> None:
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1: connection refused"):
        create_handler(parameters("127.0.0.1:1"))


def test_any_text_is_a_run_id_and_two_texts_are_two_runs() -> None:
    assert run_name("digits-1") == "torchrun-digits-1"
    names = {run_name(text) for text in ("none", "None", "a/b", "a b", "", "x" * 500, "-a", "a-")}
    assert len(names) == 8
    assert all(len(name) <= 63 for name in names)


def test_a_password_in_the_environment_is_used(
    etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELASTIC_STORE_USER", "root")
    monkeypatch.setenv("ELASTIC_STORE_PASSWORD", "secret")
    handler = create_handler(parameters(etcd_endpoint, join_timeout="1"))
    with pytest.raises(Exception, match="authentication is not enabled"):  # so it did authenticate
        handler.next_rendezvous()
