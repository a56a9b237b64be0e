from elastic_core.events.audit import EpochAudit, SampleAudit
from elastic_core.events.record import AttemptSpan
from elastic_core.events.report import MAX_FAILURES, Enclosures, RunReport, build_report
from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.progress import Progress, RunResult
from tests.elastic_core.events.records import (
    FAILED,
    PREEMPTED,
    ZERO,
    evaluation,
    failure,
    generation,
    marks,
    record,
    resumption,
    step,
)
from tests.elastic_core.events.schema import SCHEMA_FILE, schema_text
from tests.elastic_core.planning.test_slowness import SLOW


def succeeded() -> RunReport:
    audit = SampleAudit(
        dataset=64,
        epochs=(EpochAudit(epoch=0, samples=64, is_complete=True),),
        steps=4,
        steps_lost=1,
        undone={(1, 2): 1},
    )
    return build_report(
        record(
            marks=marks(teardown=20, ended=20.5),
            history=(
                generation(1, "ab", published=5, reason="2 nodes are ready"),
                generation(2, "a", Cause.LOSS, detected=12.3, published=12.4, lost={"b": "lease ended"}),
            ),
            resumptions=(
                resumption(1, assigned=5, synced=5, first_step=10, source="fresh"),
                resumption(2, last_step=12, assigned=12.5, synced=12.7, first_step=13, resumed=2),
            ),
            lines=(step(0, 10), step(1, 11), step(2, 12), step(2, 13, g=2), step(3, 19, g=2)),
            result=RunResult(
                epochs=1, steps=4, samples=64, metrics={"test_accuracy": 0.97}, model="runs/digits-1/model"
            ),
            audit=audit,
        ),
        Enclosures(
            pictures=("curve.png",),
            logs={"a": ("logs/a/agent.log",)},
            resumable_with="elastic-train train job.yaml",
            versions={"python": "3.11.9"},
        ),
    )


def test_a_report_of_a_good_run_says_what_was_trained_and_what_it_cost() -> None:
    report = succeeded()
    assert report.state is Outcome.SUCCEEDED
    assert (report.exit_code, report.wall_s, report.test_accuracy) == (0, 20.5, 0.97)
    assert (report.epochs, report.steps, report.samples) == (1, 4, 64)
    assert (report.steps_lost, report.samples_missed, report.samples_repeated) == (1, 0, 0)
    assert report.exactly_once.startswith("every one of 64 sample ids was used exactly once")
    assert report.model == "runs/digits-1/model"
    assert report.resumable_with == "", "there is nothing to go on with"


def test_the_ledger_of_a_report_has_every_class_and_sums_up_to_the_wall_time() -> None:
    report = succeeded()
    assert len(report.ledger) == 10
    assert round(sum(report.ledger.values()), 3) == report.wall_s
    assert report.goodput == round((7.0 + 6.0) / 20.5, 4)


def test_generations_tell_who_trained_why_and_at_what_cost() -> None:
    first, second = succeeded().generations
    assert (first.number, first.cause, first.reason) == (1, "start", "2 nodes are ready")
    assert [member.node_id for member in first.members] == ["a.1", "b.1"]
    assert (first.world_size, first.published_at, first.step, first.source) == (2, ZERO + 5, 0, "fresh")
    assert (first.cost_s, first.steps_lost) == (0.0, 0)
    assert (second.cause, second.lost) == ("loss", {"b.1": "lease ended"})
    assert (second.cost_s, second.steps_lost, second.step) == (1.0, 1, 2)


def test_the_first_failure_that_no_other_explains_is_the_root_cause() -> None:
    report = build_report(
        record(
            closed=FAILED,
            history=(generation(1, "abc", published=5, restarts=2),),
            failures=(
                failure("a", 1, rank=0, consequence=True),
                failure("b", 1, rank=1, location="train.py:12", step=30),
                failure("c", 1, rank=2, message="OSError: full"),
                failure("c", 1, rank=2, consequence=True),
            ),
        ),
        Enclosures(resumable_with="elastic-train train job.yaml"),
    )
    assert report.first_failure is not None
    assert report.first_failure.headline == (
        "rank 1 on node b.1: ValueError: bad label 7 at train.py:12 after step 30"
    )
    assert [row.rank for row in report.consequences] == [0, 2]
    assert (report.state, report.exit_code, report.restart_count) == (Outcome.FAILED, 7, 2)
    assert report.resumable_with == "elastic-train train job.yaml"


def test_a_flood_of_consequences_is_bounded() -> None:
    failures = tuple(failure("a", 1, rank=rank, consequence=True) for rank in range(MAX_FAILURES + 50))
    report = build_report(record(closed=FAILED, failures=failures))
    assert len(report.consequences) == MAX_FAILURES
    assert report.first_failure is None


def test_a_stopped_run_tells_the_steps_that_its_model_is_made_of() -> None:
    lines = (step(0, 1, samples=8), step(1, 2, samples=16), step(2, 3, samples=24))
    again = (step(1, 6, g=2, samples=16), evaluation(2, 7, g=2, test_accuracy=0.5))
    report = build_report(record(closed=PREEMPTED, lines=(*lines, *again)))
    assert (report.epochs, report.steps, report.samples, report.test_accuracy) == (0, 2, 16, 0.5)


def test_progress_that_is_ahead_of_the_metrics_counts() -> None:
    progress = Progress(generation=1, epoch=3, step=70, samples=4000)
    report = build_report(record(closed=PREEMPTED, lines=(step(0, 1, samples=8),), progress=progress))
    assert (report.epochs, report.steps, report.samples) == (3, 70, 4000)


def test_without_an_audit_nothing_is_claimed() -> None:
    report = build_report(record())
    assert (report.samples_missed, report.samples_repeated, report.exactly_once) == (None, None, "")


def test_a_report_is_read_back_from_its_json() -> None:
    report = succeeded()
    assert RunReport.model_validate_json(report.model_dump_json()) == report


def test_the_schema_in_the_docs_is_the_one_of_the_model() -> None:
    said = "the report's model changed: run `python -m tests.elastic_core.events.schema --update`"
    assert SCHEMA_FILE.read_text() == schema_text(), said


def test_a_report_tells_all_attempts_together_and_their_time_sums_up() -> None:
    earlier = AttemptSpan(
        attempt=1,
        started_at=ZERO - 50,
        ended_at=ZERO - 20,
        state="failed",
        seconds={"train": 25, "detect": 5},
    )
    report = build_report(record(attempt=2, marks=marks(ended=10), earlier=(earlier,)))
    whole = report.whole
    assert whole is not None
    assert [(row.attempt, row.state, row.wall_s) for row in whole.attempts] == [
        (1, "failed", 30),
        (2, "succeeded", 10),
    ]
    assert whole.wall_s == sum(whole.ledger.values()) == 60
    assert (whole.ledger["stopped"], whole.ledger["train"], whole.ledger["detect"]) == (20, 25, 5)
    assert whole.goodput == 25 / 40


def test_checkpoints_that_failed_are_told_with_the_reason_of_the_last() -> None:
    progress = Progress(
        generation=1, epoch=0, step=3, samples=9, metrics={"checkpoint_failures": 2.0}, trouble="disk full"
    )
    report = build_report(record(progress=progress))
    assert (report.checkpoint_failures, report.checkpoint_trouble) == (2, "disk full")


def test_a_slow_worker_is_a_row_with_its_evidence() -> None:
    (row,) = build_report(record(slow=(SLOW,))).slow_workers
    assert (row.node_id, row.ratio, row.seconds, row.others, row.step) == ("b.1", 2.0, 0.4, 0.2, 90)
    assert row.headline.startswith("rank 1 on node b.1 is slow: 2.0 times as long as the others")
