"""Bad input is refused in one line a problem, with documented exit codes, and starts nothing."""

import json
import socket
import sys
from functools import reduce
from pathlib import Path

import pytest

from flows import cli
from tests.elastic_core.trainer.classy.conftest import small_config

GOOD = """
name: digits
training: {kind: script, script: train.py}
"""


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "broken.py").write_text("import os\ndef f(:\n")
    (tmp_path / "good.yaml").write_text(GOOD)


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["elastic-train", *arguments])
    monkeypatch.setenv("PREFECT_HOME", "unused")
    with pytest.raises(SystemExit) as ending:
        cli.main()
    return int(ending.value.code or 0)


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return capsys.readouterr().err.splitlines()


@pytest.mark.case("P05")
def test_every_mistake_of_a_job_has_one_line_and_nothing_is_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bad.yaml").write_text("name: Digits\nnodes: {max: three}\nworker_per_node: 2\n")
    before = set(tmp_path.rglob("*"))
    assert run(monkeypatch, "train", "bad.yaml") == 2
    told = lines(capsys)
    assert len(told) == 3
    assert any("did you mean 'workers_per_node'?" in line for line in told)
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.case("V06")
@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("dataset.train.num_wokers", 2, "unknown key 'num_wokers' (did you mean 'num_workers'?)"),
        ("dataset.train.batchsize_per_replica", 0, "is 0; it must be a whole number of at least 1"),
        ("num_epoch", 3, "unknown key 'num_epoch' (did you mean 'num_epochs'?)"),
        ("checkpoint_folder", "./x_{time.time()}", "is './x_{time.time()}': fill in '{time.time()}'"),
    ],
)
def test_what_classy_vision_would_pass_over_is_refused_before_anything_is_made(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    path: str,
    value: object,
    told: str,
) -> None:
    config = small_config()
    *parents, key = path.split(".")
    reduce(lambda section, name: section[name], parents, config)[key] = value
    (tmp_path / "classy.yaml").write_text(json.dumps({"training": {"kind": "classy", "config": config}}))
    before = set(tmp_path.rglob("*"))
    assert run(monkeypatch, "train", "classy.yaml") == 2
    problems = [line.removeprefix("classy.yaml: ") for line in lines(capsys)]
    assert problems[0].startswith(f"training.config.{path}: {told}")
    assert {problem.split(": ")[0] for problem in problems} == {f"training.config.{path}"}
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.case("X06")
@pytest.mark.parametrize("name", ["a b", "../x", "x;id", "é", "a" * 300, ""])
def test_a_job_name_that_breaks_the_rule_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert run(monkeypatch, "train", "good.yaml", "--set", f"name='{name}'") == 2
    assert [line.split(":")[1].strip() for line in lines(capsys)] == ["name"]


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("nodes.target", "--set 'nodes.target': write path.to.key=value, as in nodes.target=3"),
        ("nodes.target=9", "good.yaml: nodes: target is 9: choose one from min (1) to max (4)"),
        (
            "training.kind=scrpt",
            "good.yaml: training.kind: unknown kind 'scrpt'; allowed: classy, script",
        ),
        ("training={script: a.py}", "good.yaml: training.kind: is required; allowed: classy, script"),
        (
            "training.script=broken.py",
            "training.script: 'broken.py', line 2: invalid syntax; mend the script",
        ),
        ("training.script=gone.py", "training.script: 'gone.py' is not a file; give the path of a script"),
    ],
)
def test_a_bad_setting_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], setting: str, told: str
) -> None:
    assert run(monkeypatch, "validate", "good.yaml", "--set", setting) == 2
    assert lines(capsys) == [told]


def test_a_good_job_is_called_good(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "validate", "good.yaml", "--set", "nodes.target=3") == 0
    assert capsys.readouterr().out == "good.yaml: job 'digits' is good: 3 nodes on pool local\n"


def test_an_etcd_that_is_not_there_is_told_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ELASTIC_ETCD", "/nope")
    before = set(tmp_path.rglob("*"))
    assert run(monkeypatch, "train", "good.yaml") == 2
    assert len(told := lines(capsys)) == 1
    assert "ELASTIC_ETCD names '/nope'" in told[0]
    assert set(tmp_path.rglob("*")) == before


@pytest.mark.case("L08")
@pytest.mark.parametrize("command", ["status", "stop", "teardown", "scale"])
def test_an_unknown_run_has_an_exit_code_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert run(monkeypatch, command, "nojob") == 3
    assert lines(capsys) == ["no such run nojob"]


def test_a_cluster_is_named_with_its_region(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "reconcile", "--no-docker", "--aws", "elastic") == 2
    assert lines(capsys) == ["--aws 'elastic': write CLUSTER@REGION, as in elastic@us-west-2"]


def test_where_nothing_was_ever_started_nothing_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(tmp_path.rglob("*"))
    assert run(monkeypatch, "reconcile", "--no-docker") == 0
    assert capsys.readouterr().out == "0 found, 0 without an owner\n"
    assert set(tmp_path.rglob("*")) == before


def test_a_port_in_use_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert run(monkeypatch, "server", "up", "--port", str(port)) == 2
    assert lines(capsys) == [f"--port: port {port} is in use by another program; choose another one"]
    assert not (tmp_path / ".elastic").exists()


def test_there_is_no_server_before_one_was_started(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, "server", "down") == 0
    assert capsys.readouterr().out == "no Prefect server was running\n"
