"""The page of a run says first what ended it."""

from pathlib import Path

from elastic_core.events.report import Enclosures, RunReport, build_report
from elastic_core.model.failure import Failure
from flows.page import page_of
from tests.elastic_core.events.records import FAILED, failure, record


def report_of(*failures: Failure) -> RunReport:
    enclosures = Enclosures(
        logs={"a": ("logs/a/agent.log",)}, resumable_with="elastic-train train job.yaml --run-id digits-1"
    )
    return build_report(record(closed=FAILED, failures=failures), enclosures)


def test_the_first_failure_stands_above_everything_that_follows_from_it() -> None:
    told = report_of(
        failure("b", 1, rank=1, consequence=True, message="connection reset by peer"),
        failure("a", 1, rank=0, exit_code=7, message="ValueError: bad label 7"),
    )
    page = page_of(told, Path("runs/digits-1"), is_over=True)
    assert told.first_failure is not None
    parts = page.split("\n\n")
    at = parts.index("## First failure")
    assert parts[at + 1] == f"**{told.first_failure.headline}**"
    assert "ValueError: bad label 7" in parts[at + 1]
    assert "logs of the node: `logs/a/agent.log`" in parts
    assert "connection reset" not in page
    assert parts.index("It goes on with `elastic-train train job.yaml --run-id digits-1`") > at
    assert parts[-1].startswith("| spent on | seconds |")


def test_a_run_that_goes_on_tells_no_end() -> None:
    page = page_of(report_of(), Path("runs/digits-1"), is_over=False)
    assert "attempt 1: training" in page
    assert "First failure" not in page
    assert "It goes on with" not in page
