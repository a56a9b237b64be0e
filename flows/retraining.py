"""Retraining in this very process, and the commands that look after its models."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.model.job import JobSpec
from elastic_core.quality.gate import Gate
from flows.audience import listening
from flows.live import make_view
from flows.session import connect_prefect
from tasks.overrides import apply_overrides
from tasks.prefect_server import HOME
from tasks.registry.choice import MODELS, chosen, open_registry
from tasks.registry.protocol import Registry

models = typer.Typer(
    no_args_is_help=True, help="The trained models of a job: which there are, which is used."
)

Job = Annotated[str, typer.Argument(help="Name of the job.")]
Where = Annotated[
    str, typer.Option("--registry", help="Directory of all models, or an address of MLflow's: http://…")
]


def retrain_here(job: JobSpec, gate: Gate, *, registry: str, force: bool, runs: Path) -> int:
    """Run the flow in this process and return the exit code of how it ended."""
    url = connect_prefect()
    from flows.retrain import REFUSED, elastic_retrain

    with make_view() as view, listening(view):
        state: Any = elastic_retrain(
            job, gate, chosen(registry), force=force, runs=str(runs), return_state=True
        )
    typer.echo(f"Prefect UI: {url}")
    if state.is_completed():
        typer.echo(state.message)
        return ExitCode.NOT_PROMOTED if state.name == REFUSED else ExitCode.OK
    if view.end is not None:
        typer.echo(f"{view.end.outcome}: {view.end.reason}")
        typer.echo(f"report: {view.end.report}")
        return view.end.exit_code
    error = state.result(raise_on_failure=False)
    if isinstance(error, ElasticError):
        raise error
    raise ElasticError(f"the flow ended as {state.name}: {error}")


def parse_gate(settings: list[str]) -> Gate:
    """Return the gate of rules written as `RULE=VALUE`.

    Raises:
        RefusedInput: All mistakes.
    """
    rules = apply_overrides({}, settings)
    try:
        return Gate.model_validate(rules)
    except ValidationError as error:
        allowed = ", ".join(Gate.model_fields)
        raise RefusedInput(
            [
                f"--gate {'.'.join(map(str, each['loc']))}: {each['msg']}; rules: {allowed}"
                for each in error.errors()
            ]
        ) from error


@models.command(name="list")
def list_models(job: Job, registry: Where = MODELS) -> None:
    """List a job's models, the newest first."""
    kept = open_registry(chosen(registry), job, HOME)
    champion = kept.champion()
    table = Table("version", "made (UTC)", "accuracy", "begun with", "run", "the gate said")
    for version in reversed(kept.versions()):
        lineage = version.lineage
        said = f"{'let through' if lineage.is_accepted else 'refused'}: {'; '.join(lineage.reasons)}"
        table.add_row(
            Text(f"{version.number}{' champion' if version.number == champion else ''}"),
            datetime.fromtimestamp(lineage.created_at, UTC).strftime("%Y-%m-%d %H:%M"),
            f"{lineage.metrics['accuracy']:.2%}" if "accuracy" in lineage.metrics else "",
            "" if lineage.parent is None else f"version {lineage.parent}",
            lineage.run,
            Text(said),
        )
    Console().print(table if table.row_count else f"job {job!r} has no models yet", markup=False)


@models.command()
def promote(
    job: Job, version: Annotated[int, typer.Argument(help="Number of a version.")], registry: Where = MODELS
) -> None:
    """Make a version champion, whatever the gate said."""
    kept = open_registry(chosen(registry), job, HOME)
    kept.promote(version)
    _tell(kept, version)


@models.command()
def rollback(job: Job, registry: Where = MODELS) -> None:
    """Make the champion before this one champion again."""
    kept = open_registry(chosen(registry), job, HOME)
    _tell(kept, kept.rollback())


def _tell(kept: Registry, version: int) -> None:
    typer.echo(f"champion: version {version} in {kept.fetch(version)}")
