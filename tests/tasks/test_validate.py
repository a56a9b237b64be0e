"""A job is resolved to mean the same everywhere, and a good one is checked once."""

import json
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec, ScriptTraining
from tasks import validate
from tasks.validate import ValidationFailed, check, resolve

CLASSY = JobSpec(training=ClassyTraining(config={"name": "classification_task"}))


def test_a_config_file_becomes_part_of_the_job(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"num_epochs": 2}))
    resolved = resolve(JobSpec(training=ClassyTraining(config=str(config))))
    assert resolved.training == ClassyTraining(config={"num_epochs": 2})


@pytest.mark.parametrize(
    ("text", "problem"),
    [(None, "No such file"), ("{", "is not JSON"), ("[]", "must hold an object, not list")],
)
def test_an_unreadable_config_is_refused_by_name(tmp_path: Path, text: str | None, problem: str) -> None:
    config = tmp_path / "config.json"
    if text is not None:
        config.write_text(text)
    with pytest.raises(RefusedInput, match=rf"training\.config: .*config\.json.*{problem}"):
        resolve(JobSpec(training=ClassyTraining(config=str(config))))


def test_a_scripts_path_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    resolved = resolve(JobSpec(training=ScriptTraining(script="train.py")))
    assert resolved.training == ScriptTraining(script=str(tmp_path / "train.py"))


def judged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str) -> None:
    """Let this program judge instead of the trainer."""
    judge = tmp_path / "judge"
    judge.write_text(f"#!/bin/sh\necho called >> {tmp_path}/calls\n{program}\n")
    judge.chmod(0o755)
    monkeypatch.setattr(validate.sys, "executable", str(judge))


def calls(tmp_path: Path) -> int:
    return len((tmp_path / "calls").read_text().splitlines())


def test_the_judge_remembers_good_jobs_in_the_given_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, tmp_path, f"""echo "$@" > {tmp_path}/asked; echo '{{"problems": []}}'""")
    check(CLASSY, tmp_path)
    assert (tmp_path / "asked").read_text().endswith(f"--cache {tmp_path / 'validated'}\n")


def test_a_bad_job_is_refused_with_all_its_problems_and_not_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, tmp_path, """echo '{"problems": ["a: is wrong", "b: too"]}'; exit 2""")
    for _ in range(2):
        with pytest.raises(RefusedInput) as refused:
            check(CLASSY, tmp_path)
        assert refused.value.problems == ("a: is wrong", "b: too")
    assert calls(tmp_path) == 2


def test_a_check_that_breaks_is_no_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(monkeypatch, tmp_path, "echo Traceback >&2; exit 1")
    with pytest.raises(ValidationFailed, match=r"broke \(exit 1\):\nTraceback"):
        check(CLASSY, tmp_path)


def test_code_of_a_users_package_is_checked_every_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, tmp_path, """echo '{"problems": []}'""")
    job = JobSpec(training=ClassyTraining(config={}, user_package="mine"))
    check(job, tmp_path)
    check(job, tmp_path)
    assert calls(tmp_path) == 2
