"""What no run owns is found and ended; what a run owns, or another directory's run, is not touched."""

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.cluster.provider import LaunchRequest
from elastic_core.errors import RefusedInput
from elastic_core.ids import RunId
from elastic_core.model.job import JobSpec
from tasks.etcd import EtcdProcess
from tasks.process import ProcessIdentity, carrying, marked
from tasks.providers.local import NODE_MARK, LocalProvider
from tasks.reconcile import Scope, reconcile, teardown
from tasks.runs import NoSuchRun, RunDirectory, job_lock

AGENT = "tests.tasks.providers.stub_agent"
HOUR_S = 3600.0


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "runs"
    yield root
    for process, value in marked(NODE_MARK):
        if value.startswith(f"{tmp_path}/"):
            os.kill(process.pid, 9)


def scope(runs: Path) -> Scope:
    return Scope(runs=str(runs), docker=False)


def a_run(runs: Path, name: str = "digits-1", job: str = "digits") -> RunDirectory:
    """A run with one node, whose flow is dead."""
    directory = RunDirectory(runs / name)
    directory.path.mkdir(parents=True)
    directory.begin_attempt(JobSpec(name=job), now=time.time())
    request = LaunchRequest(run=RunId(name), token="t", count=1, command=())  # lives until SIGTERM
    LocalProvider(runs, agent=AGENT).launch(request)
    directory.note_driven()
    return directory


def nodes_of(directory: RunDirectory) -> list[ProcessIdentity]:
    return carrying(NODE_MARK, str(directory.path.absolute() / "nodes" / "node-1.json"))


def end_with(directory: RunDirectory, outcome: str) -> None:
    directory.report_file.write_text(f'{{"state": "{outcome}"}}')


def test_a_run_that_is_driven_or_can_be_adopted_is_left_alone(runs: Path) -> None:
    driven, adoptable = a_run(runs, "digits-1"), a_run(runs, "other-1", job="other")
    with job_lock(runs, "digits") as lock:
        lock.name_run(driven.run)
        survey = reconcile(scope(runs), apply=True)
    assert [(one.holding.name, one.verdict.reason) for one in survey.findings] == [
        ("digits-1/node-1", "a flow drives its run"),
        ("other-1/node-1", "no flow drives its run since 0 s; a start adopts it, kept 60 min"),
    ]
    assert nodes_of(driven)
    assert nodes_of(adoptable)


def test_a_dry_run_tells_and_ends_nothing_and_then_everything_of_an_ended_run_goes(runs: Path) -> None:
    run = a_run(runs)
    end_with(run, "failed")
    told = reconcile(scope(runs))
    assert told.headline() == "1 found, 1 without an owner"
    (row,) = told.rows()
    (process, *_) = nodes_of(run)
    assert {**row, "what": row["what"].split("; process")[0]} == {
        "place": "local",
        "kind": "agent",
        "name": "digits-1/node-1",
        "run": "digits-1",
        "owner": "nobody",
        "what": "its run ended: failed",
    }
    assert str(process.pid) in row["what"]
    done = reconcile(scope(runs), apply=True)
    assert (done.headline(), done.left) == ("1 found, 1 without an owner, 1 ended", {})
    assert nodes_of(run) == []
    assert reconcile(scope(runs)).findings == ()


def test_nodes_whose_directory_was_deleted_are_found_by_their_mark(runs: Path) -> None:
    run = a_run(runs)
    shutil.rmtree(run.path)
    (found,) = reconcile(scope(runs), apply=True).findings
    assert (found.verdict.reason, found.outcome) == ("its run's directory is gone", "ended")
    assert nodes_of(run) == []


def test_an_unfinished_run_is_given_up_when_no_flow_came_for_long_enough(runs: Path) -> None:
    run = a_run(runs)
    long_ago = time.time() - HOUR_S
    os.utime(run.path / "driven", (long_ago, long_ago))
    assert reconcile(scope(runs), apply=True, abandoned_after_s=HOUR_S).headline().endswith("1 ended")
    assert nodes_of(run) == []


def test_another_runs_directory_is_not_looked_at(runs: Path, tmp_path: Path) -> None:
    theirs = a_run(tmp_path / "runs-of-others")
    end_with(theirs, "failed")
    assert reconcile(scope(runs), apply=True).findings == ()
    assert nodes_of(theirs)


def test_an_older_run_goes_though_a_flow_drives_another_run_of_its_job(runs: Path) -> None:
    old = a_run(runs)
    end_with(old, "failed")
    with job_lock(runs, "digits") as lock:
        lock.name_run(RunId("digits-2"))
        assert reconcile(scope(runs), apply=True).left == {}
    assert nodes_of(old) == []


def test_a_flow_that_comes_between_the_look_and_the_end_keeps_its_nodes(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tasks import reconcile as module

    run = a_run(runs)
    end_with(run, "failed")
    claim = module.claim_of(runs, run.run)
    with job_lock(runs, "digits"):
        monkeypatch.setattr(module, "claim_of", lambda *_: claim)
        (found,) = reconcile(scope(runs), apply=True).findings
    assert (found.verdict.reason, found.outcome) == ("a flow drives its run", "")
    assert nodes_of(run)


def test_the_etcd_of_an_ended_run_is_found_by_its_datas_place(runs: Path) -> None:
    run = RunDirectory(runs / "digits-1")
    run.path.mkdir(parents=True)
    etcd = EtcdProcess(run)
    etcd.start(run.begin_attempt(JobSpec(), now=0))
    try:
        end_with(run, "preempted")
        (run.path / "etcd.json").unlink()  # its starter died before it could write the record
        (found,) = reconcile(scope(runs), apply=True).findings
        assert (found.holding.kind, found.holding.name, found.outcome) == ("etcd", "digits-1/etcd-1", "ended")
    finally:
        etcd.stop()


def test_a_teardown_ends_one_run_and_no_other(runs: Path) -> None:
    mine, other = a_run(runs, "digits-1"), a_run(runs, "other-1", job="other")
    survey = teardown("digits-1", scope(runs))
    assert survey.headline() == "1 found, 1 without an owner, 1 ended"
    assert nodes_of(mine) == []
    assert nodes_of(other)


def test_a_teardown_of_a_run_that_a_flow_drives_is_refused_with_the_remedy(runs: Path) -> None:
    run = a_run(runs)
    with job_lock(runs, "digits") as lock:
        lock.name_run(run.run)
        with pytest.raises(RefusedInput, match="end it with `elastic-train stop digits-1`"):
            teardown("digits-1", scope(runs))
    assert nodes_of(run)


@pytest.mark.case("L08")
def test_a_teardown_of_an_unknown_run_is_no_silent_success(runs: Path) -> None:
    with pytest.raises(NoSuchRun, match="no such run nojob"):
        teardown("nojob", scope(runs))
