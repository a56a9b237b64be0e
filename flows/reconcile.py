"""The flows that look after what runs hold, and show where one stands: thin, over the commands' own code.

`elastic-reconcile` is scheduled in `prefect.yaml`: whatever a killed flow left is
ended by it within minutes. All may run beside trainings.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.artifacts import create_table_artifact
from prefect.states import Completed, Failed
from pydantic import Field

from flows.killed import tell_killed
from flows.status import rows_of, summary_of
from tasks import reconcile as upkeep
from tasks.reconcile import HOUR_S, Scope, Survey
from tasks.runs import RUNS

_SCOPE = Scope()


@flow(name="elastic-reconcile", retries=0)
def elastic_reconcile(
    scope: Scope = _SCOPE,
    apply: Annotated[bool, Field(description="End what no run owns; otherwise only tell.")] = False,
    abandoned_after: Annotated[
        float, Field(ge=0, description="A run that no flow drives for so many seconds is given up.")
    ] = HOUR_S,
) -> Any:
    """Find what no run owns any more, and end it if asked to; flow runs that were killed are said to be.

    Args:
        scope: Which runs directory to look after, and in which places.
        apply: End what no run owns; otherwise only tell.
        abandoned_after: A run that no flow drives for so many seconds is given up.
    """
    killed = tell_killed(Path(scope.runs)) if apply else ()
    survey = upkeep.reconcile(scope, apply=apply, abandoned_after_s=abandoned_after)
    return _told(survey, "reconcile", *killed)


@flow(name="elastic-teardown", flow_run_name="{run}", retries=0)
def elastic_teardown(
    run: Annotated[str, Field(min_length=1, description="Id of the run.")],
    scope: Scope = _SCOPE,
) -> Any:
    """End everything that a run has, in every pool; its directory stays, and it can go on later.

    Args:
        run: Id of the run.
        scope: Which runs directory to look after, and in which places.
    """
    return _told(upkeep.teardown(run, scope), f"teardown-{run}")


@flow(name="elastic-status", retries=0)
def elastic_status(
    run: Annotated[str, Field(description="Id of a run; empty: the one worked on last.")] = "",
    runs: Annotated[str, Field(description="Directory of all runs' directories.")] = str(RUNS),
) -> Any:
    """Show where a run stands: its nodes, as a table.

    Args:
        run: Id of a run; empty: the one worked on last.
        runs: Directory of all runs' directories.
    """
    directory, told = summary_of(run, runs)
    _table(f"status-{directory.run}", rows_of(directory), told)
    return Completed(message=told)


def _told(survey: Survey, key: str, *more: str) -> Any:
    _table(key, survey.rows(), survey.headline())
    state = Failed if survey.left else Completed
    return state(message="; ".join((survey.headline(), *more)))


def _table(key: str, rows: Sequence[dict[str, str]], description: str) -> None:
    create_table_artifact(table=json.loads(json.dumps(rows)), key=f"elastic-{key}", description=description)
