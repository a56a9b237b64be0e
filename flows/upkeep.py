"""Commands that look after what runs hold: reconcile and teardown, here or as flows (`flows.reconcile`)."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_core.exits import ExitCode
from tasks.reconcile import Scope, Survey, reconcile, teardown


def reconcile_here(scope: Scope, *, apply: bool, abandoned_after: float) -> int:
    """Print what was found, and what was ended; return the exit code."""
    survey = reconcile(scope, apply=apply, abandoned_after_s=abandoned_after)
    _print(survey)
    if survey.orphans and not apply:
        Console(highlight=False).print("nothing was ended; do it with --apply")
    return ExitCode.FAILED if survey.left else ExitCode.OK


def teardown_here(run: str, scope: Scope) -> int:
    """End everything of a run and print what that was; return the exit code."""
    survey = teardown(run, scope)
    _print(survey)
    return ExitCode.FAILED if survey.left else ExitCode.OK


def _print(survey: Survey) -> None:
    console = Console(highlight=False, soft_wrap=True)
    table = Table("place", "kind", "name", "run", "owner", "what")
    for row in survey.rows():
        table.add_row(*map(Text, row.values()))
    if table.row_count:
        console.print(table)
    console.print(Text(survey.headline()))
