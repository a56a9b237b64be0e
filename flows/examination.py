"""The commands `doctor` and `logs`: what to look at when something does not go as it should."""

from __future__ import annotations

from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from elastic_core.exits import ExitCode
from elastic_core.model.job import AwsPool
from tasks.doctor import Grade, examine
from tasks.logs import RunLogs
from tasks.runs import find_run, is_driven

_STYLES = {Grade.GOOD: "green", Grade.WARNING: "yellow", Grade.BAD: "bold red"}


def examine_here(*, runs: Path, pool: str, store: str, aws: AwsPool | None) -> int:
    """Print what each check finds, with its remedy; return 1 if something is bad."""
    console = Console(highlight=False, soft_wrap=True)
    bad = 0
    for finding in examine(runs=runs, pool=pool, store=store, aws=aws):
        bad += finding.grade is Grade.BAD
        grade = Text(f"{finding.grade:<8}", style=_STYLES[finding.grade])
        console.print(Text.assemble(grade, f"{finding.name:<12}", finding.told))
        if finding.remedy:
            console.print(Text(f"{'':20}-> {finding.remedy}"))
    return ExitCode.FAILED if bad else ExitCode.OK


def show_logs(run: str, runs: Path, *, node: str, lines: int, follow: bool) -> None:
    """Print what a run's nodes said.

    Raises:
        NoSuchRun: There is no such run.
        RefusedInput: There is no such node, or nothing was written here.
    """
    directory = find_run(runs, run)
    logs = RunLogs(directory, node)
    for line in logs.tail(lines):
        typer.echo(line)
    if not follow:
        return

    def is_over() -> bool:
        return directory.outcome() is not None and not is_driven(runs, directory.job().name)

    for line in logs.follow(is_over):
        typer.echo(line)
