"""A training in this very process: server, flow, live progress, and the last lines that people read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from elastic_core.errors import ElasticError
from elastic_core.model.job import JobSpec
from flows.audience import RunEnd, listening
from flows.live import LiveView, make_view
from tasks import prefect_server
from tasks import report as reports
from tasks.runs import RUNS


def train_here(job: JobSpec, *, run_id: str = "", max_time: float = 0, runs: Path = RUNS) -> int:
    """Run the flow in this process and return the exit code of how it ended."""
    url = connect_prefect()
    with make_view() as view:
        end = run_flow(job, view, run_id=run_id, max_time=max_time, runs=runs)
    tell_end(end, url)
    return end.exit_code


def connect_prefect() -> str:
    """Point Prefect's client at a running server, started if there is none; return the UI's address.

    A server that the environment names is used as it is. Must be called before Prefect is imported.
    """
    prefect_home = Path(os.environ["PREFECT_HOME"])
    prefect_home.mkdir(parents=True, exist_ok=True)  # Prefect warns of a home that it has to make
    # Decisions are shown by our own view; Prefect keeps them in its UI.
    os.environ.setdefault("PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_INTERNAL_LEVEL", "CRITICAL")
    # A server that went away must not hold up the end of a run: 14 s a call, not a minute.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "3")
    if "PREFECT_API_URL" in os.environ:
        return os.environ["PREFECT_API_URL"].removesuffix("/api")
    if prefect_server.status() is None:
        typer.echo("starting the local Prefect server (stop it with `make down`)")
    record = prefect_server.begin()
    prefect_server.wait_healthy(record)
    os.environ.update(prefect_server.client_environment(record))
    return record.url


def run_flow(
    job: JobSpec, view: LiveView, *, run_id: str = "", max_time: float = 0, runs: Path = RUNS
) -> RunEnd:
    """Run the flow under a view and return how it ended.

    Raises:
        ElasticError: As the flow raised it; the state on the server says the same.
    """
    from flows.train import elastic_train

    try:
        with listening(view):
            state: Any = elastic_train(
                job, run_id=run_id, max_time=max_time, runs=str(runs), return_state=True
            )
    except Exception:
        # The run itself is over and torn down; only the server did not hear of it.
        if view.end is not None:
            return view.end
        raise
    if view.end is not None:
        return view.end
    error = state.result(raise_on_failure=False)
    if isinstance(error, ElasticError):
        raise error
    raise ElasticError(f"the flow ended as {state.name}: {error}")


def tell_end(end: RunEnd, url: str) -> None:
    """Print how a run ended, how to go on, and where the report is: always the last line."""
    report = reports.read(end.report.parent)
    if report is not None:
        reports.render(report, Console(highlight=False))
    if report is None or report.reason != end.reason:
        typer.echo(f"{end.outcome}: {end.reason}")
    typer.echo(f"Prefect UI: {url}")
    typer.echo(f"report: {end.report}")
