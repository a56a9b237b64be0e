"""Each thing that keeps a machine from training is named with its remedy."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import doctor
from tasks.doctor import Finding, Grade, examine


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "HOME", tmp_path / "home")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)


def found(name: str, runs: Path, **asked: str) -> Finding:
    return next(finding for finding in examine(runs=runs, **asked) if finding.name == name)  # type: ignore[arg-type]


def test_a_good_machine_has_nothing_bad_and_nothing_is_made(tmp_path: Path, etcd_endpoint: str) -> None:
    findings = list(examine(runs=tmp_path / "runs", store=etcd_endpoint))
    assert [finding for finding in findings if finding.grade is Grade.BAD] == []
    assert all(bool(finding.remedy) == (finding.grade is not Grade.GOOD) for finding in findings)
    assert list(tmp_path.iterdir()) == []


def test_an_etcd_that_is_not_there_is_named_with_what_to_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD", "/nope")
    etcd = found("etcd", tmp_path)
    assert etcd.grade is Grade.BAD
    assert "ELASTIC_ETCD names '/nope'" in etcd.remedy


def test_a_full_disk_is_bad_and_a_nearly_full_one_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    grades: Iterator[Grade] = (_disk_with(gib, tmp_path, monkeypatch) for gib in (0.5, 2, 50))
    assert list(grades) == [Grade.BAD, Grade.WARNING, Grade.GOOD]


def _disk_with(gib: float, runs: Path, monkeypatch: pytest.MonkeyPatch) -> Grade:
    usage = type("Usage", (), {"free": gib * 2**30})
    with monkeypatch.context() as patch:
        patch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
        return found("disk", runs).grade


def test_a_hostname_that_means_loopback_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostbyname", lambda _: "127.0.1.1")
    name = found("hostname", tmp_path)
    assert (name.grade, "resolves to 127.0.1.1" in name.told) == (Grade.WARNING, True)
    assert "--advertise" in name.remedy


def test_ports_that_outgoing_connections_take_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ports = tmp_path / "range"
    monkeypatch.setattr(doctor, "_EPHEMERAL", ports)
    ports.write_text("32768\t60999\n")
    assert found("ports", tmp_path).grade is Grade.GOOD
    ports.write_text("15000\t65000\n")
    taken = found("ports", tmp_path)
    assert (taken.grade, "take 15000 to 65000" in taken.told) == (Grade.WARNING, True)


def test_a_server_that_does_not_answer_is_bad(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    prefect = found("prefect", tmp_path)
    assert (prefect.grade, "http://127.0.0.1:1/api does not answer" in prefect.told) == (Grade.BAD, True)
    assert "PREFECT_API_URL" in prefect.remedy


def test_a_store_that_does_not_answer_is_bad_and_its_clock_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_computing", lambda: iter(()))
    findings = {finding.name: finding for finding in examine(runs=tmp_path, store="127.0.0.1:1")}
    assert findings["store"].grade is Grade.BAD
    assert "clock" not in findings


def test_a_clock_that_is_wrong_is_told_against_the_stores(
    tmp_path: Path, etcd_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found("clock", tmp_path, store=etcd_endpoint).grade is Grade.GOOD
    real = time.time()
    monkeypatch.setattr(doctor, "_clock", lambda endpoint: clock(endpoint, lambda: real + 600))
    late = found("clock", tmp_path, store=etcd_endpoint)
    assert late.grade is Grade.WARNING
    assert "s ahead of" in late.told


clock = doctor._clock
