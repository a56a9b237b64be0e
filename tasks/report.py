"""The end of a run as people and programs read it: gathered from its directory, written, and shown."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_core.cluster.provider import InstanceState
from elastic_core.events.audit import SampleAudit, fold_audit
from elastic_core.events.ledger import fold_ledger
from elastic_core.events.lines import parse_lines
from elastic_core.events.metrics import MetricLine, dataset_size, parse_metrics
from elastic_core.events.record import AttemptSpan, RunMarks, RunRecord
from elastic_core.events.report import Enclosures, RunReport, WholeRun, build_report
from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.membership import Closed, Outcome
from elastic_core.model.progress import HistoryEntry
from tasks.pictures import draw_all
from tasks.runs import RunDirectory, read_costs
from tasks.watch import Observation

_PACKAGES: Final = (
    "elastic-train", "torch", "torchvision", "classy-vision", "prefect", "cslab-etcd3", "boto3", "docker",
)  # fmt: skip


# ---- gathering -------------------------------------------------------------------------------


def collect(
    directory: RunDirectory, closed: Closed, seen: Observation, *, now: float, resumable_with: str = ""
) -> RunReport:
    """Return the report of the newest attempt, its pictures drawn into the run's directory.

    Args:
        directory: The run's.
        closed: How the attempt ended.
        seen: What the store said last; `tasks.watch.observe` reads it from a store.
        now: The end of the attempt, in wall-clock seconds.
        resumable_with: Command that goes on with an unfinished run.
    """
    record = gather(directory, closed, seen, now=now)
    enclosures = Enclosures(
        logs=_logs(directory.path),
        resumable_with=resumable_with,
        versions=_versions(_PACKAGES),
        costs=read_costs(directory.path),
    )
    report = build_report(record, enclosures)
    return report.model_copy(update={"pictures": draw_all(report, record.lines, directory.path)})


def so_far(directory: RunDirectory, seen: Observation, *, now: float) -> RunReport:
    """Return the report of an attempt that goes on, as if it ended now, its pictures drawn.

    Without the sample audit: that reads every sample of the run, and this is called again and again.
    """
    closed = Closed(outcome=Outcome.PREEMPTED, exit_code=ExitCode.PREEMPTED, reason="going on")
    record = gather(directory, closed, seen, now=now, audited=False)
    report = build_report(record)
    return report.model_copy(update={"pictures": draw_all(report, record.lines, directory.path)})


def gather(
    directory: RunDirectory, closed: Closed, seen: Observation, *, now: float, audited: bool = True
) -> RunRecord:
    """Return all that is known of the newest attempt."""
    lines = tuple(parse_metrics(_lines_of(directory.path / "metrics.jsonl")))
    return RunRecord(
        run=directory.run,
        attempt=directory.attempt(),
        job=directory.job(),
        closed=closed,
        marks=directory.marks(ended_at=now),
        history=_with_causes(seen),
        resumptions=seen.resumptions,
        failures=seen.failures,
        slow=seen.slow,
        result=seen.result,
        progress=seen.progress,
        lines=lines,
        audit=_audit(directory, closed, seen, lines) if audited else None,
        earlier=tuple(_earlier(directory, lines)),
    )


def _earlier(directory: RunDirectory, lines: tuple[MetricLine, ...]) -> Iterator[AttemptSpan]:
    """Yield the attempts before the newest; one that left no report is told by its steps alone."""
    for number in range(1, directory.attempt()):
        report_file, marks_file = directory.attempt_files(number)
        with suppress(OSError, ValueError, KeyError):
            report = json.loads(report_file.read_bytes())
            yield AttemptSpan(
                attempt=number,
                started_at=report["started_at"],
                ended_at=report["started_at"] + report["wall_s"],
                state=report["state"],
                seconds=report["ledger"],
            )
            continue
        with suppress(OSError, ValueError, KeyError):
            started_at = json.loads(marks_file.read_bytes())["started_at"]
            ended_at = max([line.wall_time for line in lines if line.attempt == number], default=started_at)
            record = RunRecord(
                run=directory.run,
                attempt=number,
                job=directory.job(),
                closed=Closed(outcome=Outcome.FAILED, exit_code=ExitCode.FAILED, reason="nobody said"),
                marks=RunMarks(started_at=started_at, ended_at=max(started_at, ended_at)),
                lines=lines,
            )
            yield AttemptSpan(
                attempt=number,
                started_at=started_at,
                ended_at=record.marks.ended_at,
                state="unknown",
                seconds={str(spent): took for spent, took in fold_ledger(record).seconds().items()},
            )


def _with_causes(seen: Observation) -> tuple[HistoryEntry, ...]:
    """Return the history, with what the provider knows of the ends of lost nodes beside what was seen."""
    causes = {node.name: node.detail for node in seen.instances if node.state is InstanceState.ENDED}

    def told(node: NodeId, how: str) -> str:
        return "; ".join(part for part in (how, causes.get(instance_of(node), "")) if part)

    return tuple(
        replace(entry, lost={node: told(node, how) for node, how in entry.lost.items()})
        for entry in seen.history
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
    """Print the report's summary: how it ended, what it cost, and whether every sample was used once.

    What others wrote (reasons, messages, names) is shown as it is, never read as markup.
    """

    def say(line: str, style: str = "") -> None:
        console.print(Text(line, style=style), soft_wrap=True)

    say(f"run {report.run} (job {report.job}, attempt {report.attempt}): {report.state}")
    say(f"  {report.reason}")
    say(f"  {_figures(report)}")
    if report.exactly_once:
        say(f"  {report.exactly_once}", "" if _is_exact(report) else "bold red")
    if report.checkpoint_trouble:
        times = report.checkpoint_failures
        say(
            f"  the last checkpoint was not written ({times} so far): {report.checkpoint_trouble}", "bold red"
        )
    if report.cost_usd is not None:
        count = len(report.costs)
        say(f"  cost: ${report.cost_usd:.2f} for {count} {'machine' if count == 1 else 'machines'}")
    console.print(_ledger_table(report))
    if report.whole is not None and len(report.whole.attempts) > 1:
        console.print(_whole_table(report.whole))
    if report.generations:
        console.print(_generations_table(report))
    if report.faults:
        console.print(_faults_table(report))
    if report.first_failure is not None:
        say(f"first failure: {report.first_failure.headline}")
    if report.resumable_with:
        say(f"goes on with: {report.resumable_with}")
    if report.model:
        say(f"model: {report.model}")
    if report.pictures:
        say(f"pictures, beside the report: {', '.join(report.pictures)}")


def _figures(report: RunReport) -> str:
    if not report.steps:  # a script tells none
        return f"no steps were reported, {report.wall_s:.1f} s"
    accuracy = "" if report.test_accuracy is None else f"test accuracy {report.test_accuracy:.2%}, "
    lost = f"{report.steps_lost} {'step' if report.steps_lost == 1 else 'steps'} lost"
    return f"{accuracy}{report.epochs} epochs, {report.steps} steps, {lost}, {report.wall_s:.1f} s"


def _is_exact(report: RunReport) -> bool:
    return not (report.samples_missed or report.samples_repeated)


def _ledger_table(report: RunReport) -> Table:
    table = _table("where the time went", "spent on", "seconds", "share", right=("seconds", "share"))
    for spent, seconds in report.ledger.items():
        if seconds:
            share = seconds / report.wall_s if report.wall_s else 0.0
            _row(table, spent.replace("_", " "), f"{seconds:.2f}", f"{share:.1%}")
    table.add_section()
    _row(table, "all", f"{report.wall_s:.2f}", "100.0%")
    return table


def _whole_table(whole: WholeRun) -> Table:
    title = f"where the time of all {len(whole.attempts)} attempts went"
    table = _table(title, "spent on", "seconds", "share", right=("seconds", "share"))
    for spent, seconds in whole.ledger.items():
        if seconds:
            share = seconds / whole.wall_s
            _row(table, spent.replace("_", " "), f"{seconds:.2f}", f"{share:.1%}")
    table.add_section()
    _row(table, "all", f"{whole.wall_s:.2f}", "100.0%")
    return table


def _generations_table(report: RunReport) -> Table:
    columns = ("generation", "at", "cause", "world", "members", "first step", "cost")
    table = _table("generations", *columns, right=("at",))
    for row in report.generations:
        _row(
            table,
            str(row.number),
            f"{row.published_at - report.started_at:.1f} s",
            row.cause,
            str(row.world_size),
            ", ".join(instance_of(NodeId(member.node_id)) for member in row.members),
            "" if row.step is None else f"{row.step} ({row.source})",
            f"{row.cost_s:.2f} s" if row.cost_s else "",
        )
    return table


def _faults_table(report: RunReport) -> Table:
    columns = ("generation", "cause", "who", "seconds lost", "steps lost")
    table = _table("faults", *columns, right=("steps lost",))
    for fault in report.faults:
        lost = ", ".join(f"{spent.replace('_', ' ')} {took:.2f}" for spent, took in fault.seconds.items())
        _row(table, str(fault.generation), fault.cause, fault.who, lost, str(fault.steps_lost))
    return table


def _table(title: str, *columns: str, right: tuple[str, ...]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table


def _row(table: Table, *cells: str) -> None:
    table.add_row(*map(Text, cells))
