"""From a run's directory and what its store said to `report.json` and the summary that people read."""

import io
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.events.ledger import Spent
from elastic_core.events.report import RunReport
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Cause, Closed
from elastic_core.model.progress import RunResult
from elastic_core.trainer.audit_log import AuditLog
from elastic_core.trainer.journal import Journal
from tasks import report as reports
from tasks.runs import RunDirectory, choose_run
from tasks.watch import Observation
from tests.elastic_core.events.records import FAILED, SUCCEEDED, ZERO, failure, generation, resumption

BATCH, DATASET, EPOCHS = 4, 10, 2
STEPS = 6


class Trained:
    """A run of two workers: b is lost after step 3, and a does that step again alone."""

    def __init__(self, root: Path) -> None:
        self.directory: RunDirectory = choose_run(
            root, JobSpec(name="tiny"), now=datetime(2026, 12, 1, tzinfo=UTC)
        )
        self.path = self.directory.path
        self.directory.begin_attempt(self.directory.job(), now=ZERO)
        self.directory.mark("teardown_at", now=ZERO + 20)
        a, b = (AuditLog(Journal(self.path / "samples" / f"{name}.1-0.jsonl"), attempt=1) for name in "ab")
        metrics = Journal(self.path / "metrics.jsonl")
        for log in (a, b):
            log.generation_started(1, step=0, source="fresh")
        for step in range(4):
            self.train(step, [a, b], metrics, generation=1, at=10 + step)
        a.generation_started(2, step=3, source="checkpoint")
        for step in range(3, STEPS):
            self.train(step, [a], metrics, generation=2, at=12 + step)
        (self.path / "logs" / "a" / "workers").mkdir(parents=True)
        (self.path / "logs" / "a" / "agent.log").write_text("")
        (self.path / "logs" / "a" / "workers" / "0.log").write_text("")
        self.seen = Observation(
            history=(
                generation(1, "ab", published=5),
                generation(2, "a", Cause.LOSS, detected=13.5, published=13.6, lost={"b": "lease ended"}),
            ),
            resumptions=(
                resumption(1, assigned=5, synced=5, first_step=10),
                resumption(2, last_step=13, assigned=13.7, synced=14, first_step=15, before=3, resumed=3),
            ),
            result=RunResult(
                epochs=EPOCHS,
                steps=STEPS,
                samples=EPOCHS * DATASET,
                metrics={"test_accuracy": 0.9},
                model="m",
            ),
        )

    def train(
        self, step: int, workers: list[AuditLog], metrics: Journal, *, generation: int, at: float
    ) -> None:
        epoch, number = divmod(step, STEPS // EPOCHS)
        batch = list(range(DATASET))[number * BATCH :][:BATCH]
        for rank, worker in enumerate(workers):
            worker.step_begun(epoch=epoch, step=step, ids=batch[rank :: len(workers)])
        for worker in workers:
            worker.step_committed(step)
        metrics.append(self.line(step, epoch, len(workers), generation=generation, at=at))

    def line(self, step: int, epoch: int, workers: int, *, generation: int, at: float) -> dict[str, Any]:
        samples = epoch * DATASET + min((step % 3 + 1) * BATCH, DATASET)
        return {"step": step, "epoch": epoch, "samples": samples, "attempt": 1, "generation": generation,
                "world_size": workers, "wall_time": ZERO + at, "checkpoint_s": 0.0,
                "metrics": {"loss": 1 / (step + 1)}}  # fmt: skip

    def collect(self, closed: Closed = SUCCEEDED, **seen: Any) -> RunReport:
        observation = Observation(**{name: getattr(self.seen, name) for name in Observation.__slots__} | seen)
        return reports.collect(
            self.directory, closed, observation, now=ZERO + 21, resumable_with="elastic-train train tiny.yaml"
        )


@pytest.fixture
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trained:
    monkeypatch.setattr(reports, "draw_all", lambda *_: ())  # seconds that one test pays is enough
    return Trained(tmp_path)


def shown(report: RunReport) -> str:
    stream = io.StringIO()
    reports.render(report, Console(file=stream, width=140))
    return stream.getvalue()


def test_why_a_lost_node_ended_is_told_beside_how_that_was_noticed(tmp_path: Path) -> None:
    run = Trained(tmp_path)
    ended = Instance(name="b", state=InstanceState.ENDED, detail="container memory limit 64 MiB reached")
    seen = replace(run.seen, instances=(ended,))
    record = reports.gather(run.directory, SUCCEEDED, seen, now=ZERO + 21)
    assert list(record.history[1].lost.values()) == ["lease ended; container memory limit 64 MiB reached"]


def test_the_files_of_a_run_and_its_store_make_one_report(trained: Trained) -> None:
    report = trained.collect()
    assert (report.run, report.job, report.attempt) == ("tiny-20261201-000000", "tiny", 1)
    assert (report.wall_s, report.steps_lost, report.test_accuracy) == (21.0, 1, 0.9)
    assert report.exactly_once == (
        "every one of 10 sample ids was used exactly once in each of 2 epochs (0 missed, 0 repeated)"
    )
    assert report.faults[0].seconds == {
        Spent.DETECT: 0.5, Spent.RENDEZVOUS: 0.2, Spent.RESTART: 0.3, Spent.REDO: 1.0,
    }  # fmt: skip
    assert report.ledger[Spent.TEARDOWN] == 1.0
    assert report.logs == {"a": ("logs/a/agent.log", "logs/a/workers/0.log")}
    assert report.versions["python"].startswith("3.")


def test_a_report_is_written_whole_with_its_pictures_beside_it(tmp_path: Path) -> None:
    trained = Trained(tmp_path)
    report = trained.collect()
    assert reports.write(report, trained.path) == trained.directory.report_file
    assert reports.read(trained.path) == report
    assert trained.directory.is_finished()
    assert report.pictures == ("curve.png", "timeline.png", "ledger.png")
    assert all((trained.path / name).stat().st_size > 1000 for name in report.pictures)
    assert not list(trained.path.glob(".*draft"))


def test_a_script_that_tells_no_steps_is_not_said_to_have_made_none(trained: Trained) -> None:
    report = trained.collect().model_copy(update={"steps": 0, "epochs": 0})
    assert shown(report).splitlines()[2] == "  no steps were reported, 21.0 s"


def test_the_last_lines_say_where_model_and_pictures_lie(trained: Trained) -> None:
    report = trained.collect().model_copy(update={"model": "/runs/tiny/model", "pictures": ("a.png",)})
    assert shown(report).splitlines()[-2:] == [
        "model: /runs/tiny/model",
        "pictures, beside the report: a.png",
    ]


def test_a_sample_that_was_left_out_is_found_and_shown(trained: Trained) -> None:
    path = trained.path / "samples" / "b.1-0.jsonl"
    kept = [line for line in path.read_text().splitlines() if json.loads(line).get("s") != 1]
    path.write_text("\n".join(kept))
    report = trained.collect()
    assert report.samples_missed == 2
    assert report.sample_epochs[0].missed_examples == (5, 7)
    assert "2 missed, 0 repeated (epoch 1: 5, 7)" in shown(report)


def test_a_failed_run_shows_its_root_cause_and_the_command_to_go_on(trained: Trained) -> None:
    failures = (failure("a", 2, rank=0, location="train.py:9", step=4),)
    report = trained.collect(FAILED, failures=failures, result=None)
    text = shown(report)
    assert "first failure: rank 0 on node a.1: ValueError: bad label 7 at train.py:9 after step 4" in text
    assert "goes on with: elastic-train train tiny.yaml" in text


def test_the_summary_shows_ledger_generations_and_faults(trained: Trained) -> None:
    text = shown(trained.collect())
    for expected in ("test accuracy 90.00%", "1 step lost", "b (lease ended)", "100.0%", "13.6 s"):
        assert expected in text, expected
    assert "wait for capacity" not in text, "a class that took no time is not shown"


def test_what_a_job_says_cannot_change_how_the_summary_looks(trained: Trained) -> None:
    closed = Closed(outcome=FAILED.outcome, exit_code=1, reason="bad [bold]label[/bold] [/nonsense]")
    text = shown(trained.collect(closed, failures=(failure("a", 2, message="KeyError: [red]x"),)))
    assert text.count("bad [bold]label[/bold] [/nonsense]") == 1
    assert "KeyError: [red]x" in text


def test_a_run_that_never_began_still_has_a_report(tmp_path: Path) -> None:
    directory = choose_run(tmp_path, JobSpec(name="tiny"), now=datetime(2026, 12, 1, tzinfo=UTC))
    directory.begin_attempt(directory.job(), now=ZERO)
    report = reports.collect(directory, FAILED, Observation(), now=ZERO + 3)
    assert (report.wall_s, report.ledger[Spent.TEARDOWN], report.samples_missed) == (3.0, 3.0, None)
    assert report.pictures == ("ledger.png",)
    assert "rank 1 raised" in shown(report)


def test_a_report_of_another_format_is_none(tmp_path: Path) -> None:
    assert reports.read(tmp_path) is None
    (tmp_path / "report.json").write_text('{"state": "succeeded"}')
    assert reports.read(tmp_path) is None


def test_an_attempt_that_left_no_report_is_told_by_its_steps_and_the_pause_after_it_is_stopped(
    tmp_path: Path,
) -> None:
    run = Trained(tmp_path)
    run.directory.begin_attempt(run.directory.job(), now=ZERO + 60)
    report = reports.collect(run.directory, SUCCEEDED, Observation(), now=ZERO + 80)
    assert report.whole is not None
    first, second = report.whole.attempts
    assert (first.state, first.wall_s) == ("unknown", 17.0), "until its last step"
    assert (second.state, second.wall_s) == ("succeeded", 20.0)
    assert report.whole.ledger["stopped"] == 43.0
    assert sum(report.whole.ledger.values()) == report.whole.wall_s == 80.0
    assert report.whole.steps_executed == STEPS + 1
