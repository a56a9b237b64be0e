"""The flow `elastic-train`: from a job to a trained model, on nodes that come and go.

Every step adopts what exists, so a rerun continues instead of doubling: truth
lives on disk, with the provider and in etcd, never in Prefect's cache or a
hook's memory. There are no hooks, for none is a safe teardown: what a killed
flow leaves behind is adopted, or ended, by the next one.
"""

from __future__ import annotations

import time
from math import inf
from pathlib import Path
from typing import Annotated, Any, Final

from prefect import flow
from prefect.states import Cancelled, Completed, Failed
from pydantic import Field

from elastic_core.exits import ExitCode
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Closed, Outcome
from flows.audience import RunEnd, RunSnapshot, audience
from flows.killed import note_driver
from flows.metrics import exported
from flows.side import FlowSide
from flows.signals import StopSignals
from flows.supervision import Fenced, Supervision
from tasks import steps
from tasks.ownership import Ownership
from tasks.provision import Cluster
from tasks.runs import RUNS, RunDirectory, job_lock
from tasks.watch import Observation

_JOB: Final = JobSpec()


@flow(name="elastic-train", flow_run_name="{job.name}", retries=0)
def elastic_train(
    job: JobSpec = _JOB,
    run_id: Annotated[str, Field(description="A run to go on with or to make; empty: by `resume`.")] = "",
    max_time: Annotated[
        float, Field(ge=0, description="Stop, resumable, after so many seconds; 0: no limit.")
    ] = 0,
    runs: Annotated[str, Field(description="Directory of all runs' directories.")] = str(RUNS),
) -> Any:
    """Train a job on nodes that come and go.

    Args:
        job: What to train, and on what.
        run_id: A run to go on with or to make; empty: an unfinished run of this job, else a new one.
        max_time: Stop, resumable, after so many seconds; 0: no limit.
        runs: Directory of all runs' directories.
    """
    root = Path(runs)
    job = steps.validate_job(job)
    with job_lock(root, job.name) as lock:
        directory = steps.find_run(root, job, run_id)
        lock.name_run(directory.run)
        note_driver(directory)
        if directory.is_finished():
            end = _already_complete(directory)
        else:
            end = _train(job, directory, time.monotonic() + (max_time or inf))
    audience().ended(end)
    return _state(end)


def _train(job: JobSpec, directory: RunDirectory, deadline: float) -> RunEnd:
    """Train, and leave nothing running behind, whichever way it ends."""
    with StopSignals() as signals, exported(job.metrics) as metrics, FlowSide(signals, metrics) as side:
        cluster = Cluster(job, directory, pause=signals.pause)
        try:
            side.say(steps.find_or_start(cluster))
            closed, seen = _drive(cluster, side, signals, deadline)
        except KeyboardInterrupt:
            signals.ignore()
            closed, seen = _never_began(signals), Observation()
        except Fenced:
            raise
        except Exception:
            signals.ignore()
            steps.tear_down(cluster)
            raise
        steps.tear_down(cluster)
        steps.collect_report(directory, closed, seen)
        cluster.forget_store()
        side.show_again()
    return RunEnd(
        run=directory.run,
        outcome=closed.outcome,
        exit_code=closed.exit_code,
        reason=closed.reason,
        report=directory.report_file,
    )


def _drive(
    cluster: Cluster, side: FlowSide, signals: StopSignals, deadline: float
) -> tuple[Closed, Observation]:
    """Watch and replace until the run is over; return how it ended and what was seen last."""
    began_at = time.time()

    def show(observation: Observation) -> None:
        cluster.attempt.directory.note_driven()
        side.show(RunSnapshot(attempt=cluster.attempt, began_at=began_at, observation=observation))

    with (
        cluster.connected() as store,
        Supervision(cluster, store, say=side.say, show=show) as supervision,
        Ownership(store, cluster.keys, owner="a flow", lost=supervision.wake) as ownership,
    ):
        side.wake_with(supervision.wake)
        signals.tell(supervision.hear_signal)
        closed = supervision.until_closed(side, ownership, deadline)
        return closed, supervision.wait_left()


def _never_began(signals: StopSignals) -> Closed:
    reason = f"stopped: {signals.asked()}"
    return Closed(outcome=Outcome.PREEMPTED, exit_code=ExitCode.PREEMPTED, reason=reason)


def _already_complete(directory: RunDirectory) -> RunEnd:
    return RunEnd(
        run=directory.run,
        outcome=Outcome.SUCCEEDED,
        exit_code=ExitCode.OK,
        reason=f"run {directory.run} is already complete: nothing to train",
        report=directory.report_file,
    )


def _state(end: RunEnd) -> Any:
    match end.outcome:
        case Outcome.SUCCEEDED:
            return Completed(message=end.reason)
        case Outcome.PREEMPTED:
            return Cancelled(name="Preempted", message=end.reason)
        case _:
            return Failed(message=f"{end.reason} (exit code {end.exit_code})")
