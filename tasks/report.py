"""The end of a run as people and programs read it: gathered from its directory, written, and shown.

What the flow did when is noted in `marks.jsonl` as it happens, so that an attempt
that another flow adopted still has one beginning.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final, Literal

from rich.console import Console
from rich.table import Table

from elastic_core.events.audit import SampleAudit, fold_audit
from elastic_core.events.lines import parse_lines
from elastic_core.events.metrics import MetricLine, dataset_size, parse_metrics
from elastic_core.events.record import RunMarks, RunRecord
from elastic_core.events.report import Enclosures, RunReport, build_report
from elastic_core.model.membership import Closed, Outcome
from tasks.pictures import draw_all
from tasks.runs import RunDirectory
from tasks.watch import Observation

Mark = Literal["started", "asked", "granted", "teardown", "ended"]
"""Of `asked` (for the first nodes) and `granted` (enough to train) the first counts, else the last."""

_PACKAGES: Final = (
    "elastic-train", "torch", "torchvision", "classy-vision", "prefect", "cslab-etcd3", "boto3", "docker",
)  # fmt: skip


# ---- what the flow notes ---------------------------------------------------------------------


def note(directory: RunDirectory, mark: Mark, at: float) -> None:
    """Note when something of the newest attempt happened, in wall-clock seconds."""
    line = json.dumps({"attempt": directory.attempt(), "mark": mark, "at": at})
    with _marks_file(directory).open("a") as stream:
        stream.write(f"{line}\n")


def read_marks(directory: RunDirectory, *, now: float) -> RunMarks:
    """Return what was noted of the newest attempt; one without an end ends now."""
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    for line in _lines_of(_marks_file(directory)):
        mark, at = line.get("mark"), line.get("at")
        if line.get("attempt") == directory.attempt() and isinstance(mark, str) and isinstance(at, float):
            first.setdefault(mark, at)
            last[mark] = at
    return RunMarks(
        started_at=first.get("started", min(first.values(), default=now)),
        asked_at=first.get("asked"),
        granted_at=first.get("granted"),
        teardown_at=last.get("teardown"),
        ended_at=last.get("ended", now),
    )


# ---- gathering -------------------------------------------------------------------------------


def collect(
    directory: RunDirectory, closed: Closed, seen: Observation, *, now: float, resumable_with: str = ""
) -> RunReport:
    """Return the report of the newest attempt, its pictures drawn into the run's directory.

    Args:
        directory: The run's.
        closed: How the attempt ended.
        seen: What the store said last; `tasks.watch.observe` reads it from a store.
        now: The end, where none was noted.
        resumable_with: Command that goes on with an unfinished run.
    """
    record = gather(directory, closed, seen, now=now)
    enclosures = Enclosures(
        logs=_logs(directory.path), resumable_with=resumable_with, versions=_versions(_PACKAGES)
    )
    report = build_report(record, enclosures)
    return report.model_copy(update={"pictures": draw_all(report, record.lines, directory.path)})


def gather(directory: RunDirectory, closed: Closed, seen: Observation, *, now: float) -> RunRecord:
    """Return all that is known of the newest attempt."""
    lines = tuple(parse_metrics(_lines_of(directory.path / "metrics.jsonl")))
    return RunRecord(
        run=directory.run,
        attempt=directory.attempt(),
        job=directory.job(),
        closed=closed,
        marks=read_marks(directory, now=now),
        history=seen.history,
        resumptions=seen.resumptions,
        failures=seen.failures,
        result=seen.result,
        progress=seen.progress,
        lines=lines,
        audit=_audit(directory, closed, seen, lines),
    )


def _audit(
    directory: RunDirectory, closed: Closed, seen: Observation, lines: tuple[MetricLine, ...]
) -> SampleAudit | None:
    files = sorted((directory.path / "samples").glob("*.jsonl"))
    if not files:
        return None
    return fold_audit(
        (_lines_of(path) for path in files),
        dataset=dataset_size(lines, seen.result),
        is_finished=closed.outcome is Outcome.SUCCEEDED,
    )


def _logs(path: Path) -> dict[str, tuple[str, ...]]:
    folders = sorted(folder for folder in (path / "logs").glob("*") if folder.is_dir())
    return {
        folder.name: tuple(
            str(file.relative_to(path)) for file in sorted(folder.rglob("*")) if file.is_file()
        )
        for folder in folders
    }


def _versions(packages: tuple[str, ...]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _lines_of(path: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the lines of a file, none if it is not there."""
    with suppress(FileNotFoundError), path.open(encoding="utf-8", errors="replace") as stream:
        yield from parse_lines(stream)


def _marks_file(directory: RunDirectory) -> Path:
    return directory.path / "marks.jsonl"


# ---- writing and reading ---------------------------------------------------------------------


def write(report: RunReport, run_dir: Path) -> Path:
    """Write `report.json` whole, so that a reader or a crash never sees half of it; return its path."""
    path = run_dir / "report.json"
    draft = path.with_name(".report.json.draft")
    draft.write_text(report.model_dump_json(indent=2) + "\n")
    draft.replace(path)
    return path


def read(run_dir: Path) -> RunReport | None:
    """Return the report of a run that ended, None if it did not or an older version wrote it."""
    try:
        return RunReport.model_validate_json((run_dir / "report.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None


# ---- for people ------------------------------------------------------------------------------


def render(report: RunReport, console: Console) -> None:
    """Print the report's summary: how it ended, what it cost, and whether every sample was used once."""
    console.print(f"run {report.run} (job {report.job}, attempt {report.attempt}): {report.state}")
    console.print(f"  {report.reason}", markup=False)
    console.print(f"  {_figures(report)}")
    if report.exactly_once:
        console.print(f"  {report.exactly_once}", style="" if _is_exact(report) else "bold red", markup=False)
    console.print(_ledger_table(report))
    if report.generations:
        console.print(_generations_table(report))
    if report.faults:
        console.print(_faults_table(report))
    if report.first_failure is not None:
        console.print(f"first failure: {report.first_failure.headline}", markup=False)
    if report.resumable_with:
        console.print(f"goes on with: {report.resumable_with}", markup=False)


def _figures(report: RunReport) -> str:
    accuracy = "" if report.test_accuracy is None else f"test accuracy {report.test_accuracy:.2%}, "
    lost = f"{report.steps_lost} {'step' if report.steps_lost == 1 else 'steps'} lost"
    return f"{accuracy}{report.epochs} epochs, {report.steps} steps, {lost}, {report.wall_s:.1f} s"


def _is_exact(report: RunReport) -> bool:
    return not (report.samples_missed or report.samples_repeated)


def _ledger_table(report: RunReport) -> Table:
    table = Table("spent on", title="where the time went", title_justify="left")
    table.add_column("seconds", justify="right")
    table.add_column("share", justify="right")
    for spent, seconds in report.ledger.items():
        if seconds:
            share = seconds / report.wall_s if report.wall_s else 0.0
            table.add_row(spent.replace("_", " "), f"{seconds:.2f}", f"{share:.1%}")
    table.add_section()
    table.add_row("all", f"{report.wall_s:.2f}", "100.0%")
    return table


def _generations_table(report: RunReport) -> Table:
    table = Table("generation", title="generations", title_justify="left")
    table.add_column("at", justify="right")
    for name in ("cause", "world", "members", "first step", "cost"):
        table.add_column(name)
    for row in report.generations:
        table.add_row(
            str(row.number),
            f"{row.published_at - report.started_at:.1f} s",
            row.cause,
            str(row.world_size),
            ", ".join(member.node_id for member in row.members),
            "" if row.step is None else f"{row.step} ({row.source})",
            f"{row.cost_s:.2f} s" if row.cost_s else "",
        )
    return table


def _faults_table(report: RunReport) -> Table:
    table = Table("generation", "cause", "who", title="faults", title_justify="left")
    table.add_column("seconds lost")
    table.add_column("steps lost", justify="right")
    for fault in report.faults:
        lost = ", ".join(
            f"{spent.replace('_', ' ')} {seconds:.2f}" for spent, seconds in fault.seconds.items()
        )
        table.add_row(str(fault.generation), fault.cause, fault.who, lost, str(fault.steps_lost))
    return table
