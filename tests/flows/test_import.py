"""`elastic-train import`: the job on standard output or in a new file, everything else on standard error."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from elastic_core.model.job_file import load_job
from flows import cli
from tests.tasks.importers import files


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["elastic-train", "import", *arguments])
    monkeypatch.setenv("PREFECT_HOME", "unused")
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.fixture(autouse=True)
def _in_empty_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_command_line_becomes_a_job_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        run(monkeypatch, "--", "torchrun", "--nnodes=1:3", "--rdzv_backend=c10d", "main.py", "--lr", "1") == 0
    )
    told = capsys.readouterr()
    job = yaml.safe_load(told.out)
    assert job["name"] == "main"
    assert job["training"] == {"kind": "script", "script": "main.py", "args": ["--lr", "1"]}
    assert "warning: command line: flags: rendezvous 'c10d' is replaced by etcd v3" in told.err


def test_a_file_becomes_a_job_file_that_can_be_loaded_and_is_never_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "theirs.yaml").write_text(files.elastic_job("--nproc_per_node=2", "echo.py"))
    assert run(monkeypatch, "theirs.yaml", "--output", "ours.yaml") == 0
    assert load_job(tmp_path / "ours.yaml").workers_per_node == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "check it: elastic-train validate ours.yaml" in told.err
    before = (tmp_path / "ours.yaml").read_text()
    assert run(monkeypatch, "theirs.yaml", "--output", "ours.yaml") == 2
    assert "is there already" in capsys.readouterr().err
    assert (tmp_path / "ours.yaml").read_text() == before


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["none.yaml"], "file 'none.yaml': No such file or directory; read: ElasticJob"),
        (["--pool", "moon", "--", "torchrun", "a.py"], "--pool 'moon': must be local or docker"),
        (["plan.yaml"], "a ScalePlan is not a job"),
    ],
)
def test_what_cannot_be_imported_is_one_line_and_exit_code_2(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    told: str,
) -> None:
    (tmp_path / "plan.yaml").write_text(files.SCALE_PLAN)
    assert run(monkeypatch, *arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.case("F22")
def test_our_deployments_load_beside_one_with_an_empty_schedule() -> None:
    from prefect.cli.deploy._models import PrefectYamlModel  # what `prefect deploy` reads the file with

    theirs = yaml.safe_load(
        "{name: theirs, entrypoint: 'a.py:f', schedule: , work_pool: {name: p, job_variables: {}}}"
    )
    ours = yaml.safe_load((Path(__file__).parents[2] / "prefect.yaml").read_text())
    merged = PrefectYamlModel.model_validate({**ours, "deployments": [theirs, *ours["deployments"]]})
    loaded = [deployment.model_dump(exclude_unset=True, mode="json") for deployment in merged.deployments]
    alone = PrefectYamlModel.model_validate(ours).deployments
    assert loaded[1:] == [deployment.model_dump(exclude_unset=True, mode="json") for deployment in alone]
    assert loaded[0]["name"] == "theirs"
