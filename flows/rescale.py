"""The flow `elastic-rescale`: a form, or an automation's action, that sets the size of a running job.

It writes to the job's store and needs no other flow alive. A running flow can also be
told directly: `RescaleInput(target=3).send_to(flow_run_id)`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from prefect import flow
from prefect.input import RunInput
from prefect.states import Completed
from pydantic import Field

from elastic_core.rescale.decision import Rescale
from tasks.rescale import rescale
from tasks.runs import RUNS


class RescaleInput(RunInput, Rescale):
    """What a running `elastic-train` flow may be sent."""


@flow(name="elastic-rescale", flow_run_name="{run}", retries=0)
def elastic_rescale(
    run: Annotated[str, Field(min_length=1, description="Id of the run.")],
    wish: Rescale,
    wait: Annotated[
        float, Field(ge=0, description="Seconds to wait for the generation that has the new size.")
    ] = 60,
    runs: Annotated[str, Field(description="Directory of all runs' directories.")] = str(RUNS),
) -> Any:
    """Let a running job grow or shrink, without a step lost.

    Args:
        run: Id of the run.
        wish: The size that is wanted; what is 0 stays as it is.
        wait: Seconds to wait for the generation that has the new size.
        runs: Directory of all runs' directories.
    """
    return Completed(message=rescale(Path(runs), run, wish, wait_s=wait).headline())
