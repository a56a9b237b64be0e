"""The report of a run as one Markdown page: what ended it comes first, then its cost and its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from elastic_core.events.report import FailureRow, RunReport
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.membership import Outcome
from tasks.pictures import as_data_uri

_TAIL_LINES: Final = 15


def page_of(report: RunReport, directory: Path, *, is_over: bool) -> str:
    """Return the page; of a run that is not over it says how things stand.

    Args:
        report: What is known of the run.
        directory: Where its files lie.
        is_over: Whether the report is the last one.
    """
    return "\n\n".join(part for part in _parts(report, directory, is_over=is_over) if part)


def _parts(report: RunReport, directory: Path, *, is_over: bool) -> Iterator[str]:
    accuracy = "" if report.test_accuracy is None else f"test accuracy **{report.test_accuracy:.2%}**, "
    yield f"# {report.run}"
    yield f"attempt {report.attempt}: {report.state if is_over else 'training'}"
    if is_over and report.state is not Outcome.SUCCEEDED:
        yield f"**{report.reason}** (exit code {report.exit_code})"
    if report.first_failure is not None:
        yield from _root_cause(report.first_failure, report.logs)
    if is_over and report.resumable_with:
        yield f"It goes on with `{report.resumable_with}`"
    yield f"{accuracy}{report.epochs} epochs, {report.steps} steps, {report.steps_lost} steps lost"
    yield report.exactly_once
    if report.checkpoint_trouble:
        yield f"**the last checkpoint was not written**: {report.checkpoint_trouble}"
    yield _cost(report)
    yield f"model: `{report.model}`" if report.model else ""
    yield f"all files: `{directory.absolute()}`"
    for name in report.pictures:
        yield f"![{name}]({as_data_uri(directory / name)})"
    yield _ledger(report)


def _root_cause(failure: FailureRow, logs: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yield why the first worker failed, in its own words; the failures of its peers follow from it."""
    yield "## First failure"
    yield f"**{failure.headline}**"
    if said := failure.traceback or _tail(failure.log_tail):
        yield f"```\n{said.strip()}\n```"
    found = logs.get(instance_of(NodeId(failure.node_id)), ()) or logs.get(failure.node_id, ())
    if found:
        yield f"logs of the node: {', '.join(f'`{name}`' for name in found)}"


def _tail(log: str) -> str:
    return "\n".join(log.splitlines()[-_TAIL_LINES:])


def _cost(report: RunReport) -> str:
    spent = "" if report.cost_usd is None else f", cost **${report.cost_usd:.2f}**"
    return f"goodput **{report.goodput:.0%}** of {report.wall_s:.0f} s{spent}"


def _ledger(report: RunReport) -> str:
    rows = [f"| {name.replace('_', ' ')} | {took:.2f} |" for name, took in report.ledger.items() if took]
    return "\n".join(["| spent on | seconds |", "|---|---|", *rows, f"| **all** | {report.wall_s:.2f} |"])
