"""Which run a job goes on with, and who may drive it."""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.events.record import RunMarks
from elastic_core.ids import check_name
from elastic_core.model.job import ClassyTraining, ElasticOptions, JobSpec, NodeBounds, ScriptTraining
from elastic_core.model.membership import Outcome
from tasks.runs import (
    AlreadyRunning,
    NoSuchRun,
    all_runs,
    choose_run,
    differences,
    find_run,
    is_driven,
    job_lock,
)

NOW = datetime(2026, 12, 1, 12, 30, 5, tzinfo=UTC)
LATER = datetime(2026, 12, 1, 12, 30, 6, tzinfo=UTC)
JOB = JobSpec(name="digits", training=ClassyTraining(elastic=ElasticOptions(global_batch=64)))


def end(run, outcome: Outcome) -> None:
    run.report_file.write_text(f'{{"state": "{outcome}"}}')


def test_a_new_job_gets_a_run_named_after_it_and_the_time(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    assert run.run == "digits-20261201-123005"
    assert run.job() == JOB


def test_two_runs_of_one_second_have_different_names(tmp_path: Path) -> None:
    fresh = JOB.model_copy(update={"resume": "never"})
    names = [choose_run(tmp_path, fresh, now=NOW).run for _ in range(3)]
    assert names == ["digits-20261201-123005", "digits-20261201-123005-2", "digits-20261201-123005-3"]


def test_the_longest_job_name_makes_a_valid_run_id(tmp_path: Path) -> None:
    job = JOB.model_copy(update={"name": "a" * 63, "resume": "never"})
    for _ in range(2):
        assert check_name("run", choose_run(tmp_path, job, now=NOW).run)


@pytest.mark.parametrize("outcome", [None, Outcome.PREEMPTED, Outcome.FAILED, Outcome.BELOW_MINIMUM])
def test_an_unfinished_run_is_gone_on_with(tmp_path: Path, outcome: Outcome | None) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    if outcome:
        end(run, outcome)
    assert choose_run(tmp_path, JOB, now=LATER) == run


def test_a_finished_run_is_followed_by_a_new_one(tmp_path: Path) -> None:
    end(choose_run(tmp_path, JOB, now=NOW), Outcome.SUCCEEDED)
    assert choose_run(tmp_path, JOB, now=LATER).run == "digits-20261201-123006"


def test_a_job_that_trains_something_else_starts_anew(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    other = JOB.model_copy(update={"training": ScriptTraining(script="train.py")})
    assert choose_run(tmp_path, other, now=LATER) != run


def test_more_nodes_do_not_make_another_training(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    wider = JOB.model_copy(update={"nodes": NodeBounds(min=1, max=4, target=4)})
    assert choose_run(tmp_path, wider, now=LATER) == run


def test_a_derived_global_batch_makes_the_target_part_of_the_training() -> None:
    job = JobSpec(nodes=NodeBounds(target=2))
    assert differences(job, JobSpec(nodes=NodeBounds(target=3))) == ["nodes.target"]


def test_resume_never_starts_anew_and_require_insists(tmp_path: Path) -> None:
    required = JOB.model_copy(update={"resume": "require"})
    with pytest.raises(RefusedInput, match="no unfinished run of job 'digits'"):
        choose_run(tmp_path, required, now=NOW)
    run = choose_run(tmp_path, JOB, now=NOW)
    assert choose_run(tmp_path, required, now=LATER) == run
    assert choose_run(tmp_path, JOB.model_copy(update={"resume": "never"}), now=LATER) != run


def test_a_named_run_of_another_training_is_refused_naming_the_difference(tmp_path: Path) -> None:
    choose_run(tmp_path, JOB, run_id="mine", now=NOW)
    other = JOB.model_copy(update={"training": ClassyTraining(elastic=ElasticOptions(global_batch=32))})
    with pytest.raises(RefusedInput, match=r"run mine trains something else \(training\.elastic differ\)"):
        choose_run(tmp_path, other, run_id="mine", now=LATER)


@pytest.mark.parametrize("name", ["a b", "../x", "x;id", "é", "a" * 300, "A"])
def test_a_run_id_that_breaks_the_rule_is_refused_and_creates_nothing(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedInput, match="run_id: run name"):
        choose_run(tmp_path, JOB, run_id=name, now=NOW)
    assert list(tmp_path.iterdir()) == []


def test_every_attempt_has_a_higher_number_and_no_report_of_the_one_before(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    end(run, Outcome.PREEMPTED)
    assert [
        run.attempt(),
        run.begin_attempt(JOB, now=1.0),
        run.begin_attempt(JOB, now=2.0),
        run.attempt(),
    ] == [0, 1, 2, 2]
    assert run.outcome() is None
    report, marks = run.attempt_files(1)
    assert (report.exists(), json.loads(marks.read_text())) == (False, {"started_at": 1.0})


def test_the_report_of_an_attempt_is_kept_when_the_next_begins(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    run.begin_attempt(JOB, now=1.0)
    end(run, Outcome.PREEMPTED)
    written = run.report_file.read_text()
    run.begin_attempt(JOB, now=2.0)
    assert run.attempt_files(1)[0].read_text() == written


def test_marks_are_of_this_attempt_and_the_first_of_a_kind_stays(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    run.begin_attempt(JOB, now=1.0)
    run.mark("asked_at", now=2.0)
    run.begin_attempt(JOB, now=10.0)
    run.mark("granted_at", now=12.0)
    run.mark("granted_at", now=13.0)
    assert run.marks(ended_at=20.0) == RunMarks(started_at=10.0, granted_at=12.0, ended_at=20.0)


def test_an_unknown_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(NoSuchRun, match="no such run nojob"):
        find_run(tmp_path, "nojob")


def test_runs_are_listed_newest_first(tmp_path: Path) -> None:
    fresh = JOB.model_copy(update={"resume": "never"})
    old, new = (choose_run(tmp_path, fresh, now=now).run for now in (NOW, LATER))
    assert [run.run for run in all_runs(tmp_path)] == [new, old]
    assert find_run(tmp_path).run == new


@pytest.mark.case("P06")
def test_a_held_job_refuses_a_second_holder_and_names_the_run(tmp_path: Path) -> None:
    run = choose_run(tmp_path, JOB, now=NOW)
    with job_lock(tmp_path, "digits") as lock:
        lock.name_run(run.run)
        with pytest.raises(AlreadyRunning, match=f"already running \\(run {run.run}\\)"):
            job_lock(tmp_path, "digits").__enter__()
        assert is_driven(tmp_path, "digits")
        assert not is_driven(tmp_path, "digits2")
    assert not is_driven(tmp_path, "digits")


def test_the_lock_of_a_killed_holder_is_free(tmp_path: Path) -> None:
    holder = (
        "import sys, pathlib; from tasks.runs import job_lock\n"
        f"with job_lock(pathlib.Path({str(tmp_path)!r}), 'digits'):\n"
        "    print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert is_driven(tmp_path, "digits")
        process.kill()
        process.wait()
    assert not is_driven(tmp_path, "digits")
