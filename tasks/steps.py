"""The flow's steps as Prefect tasks: one call each, safe to run twice, visible in the UI."""

from __future__ import annotations

import shlex
import time
from datetime import UTC, datetime
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Closed
from tasks import report as reports
from tasks import runs, validate
from tasks.prefect_server import HOME
from tasks.provision import Cluster
from tasks.runs import RunDirectory
from tasks.watch import Observation


@task(name="validate-job", cache_policy=NO_CACHE)
def validate_job(job: JobSpec) -> JobSpec:
    """Refuse a job that cannot train; return it with its files read in."""
    resolved = validate.resolve(job)
    validate.check(resolved, HOME)
    return resolved


@task(name="find-run", cache_policy=NO_CACHE)
def find_run(root: Path, job: JobSpec, run_id: str) -> RunDirectory:
    """Return the directory to train in: an unfinished run's, or a new one."""
    validate.check_runs(job, root)
    return runs.choose_run(root, job, run_id=run_id, now=datetime.now(UTC))


@task(name="find-or-start-cluster", cache_policy=NO_CACHE)
def find_or_start(cluster: Cluster) -> str:
    """Adopt what runs of the run, or start etcd and nodes anew; return what was decided."""
    return cluster.find_or_start()


@task(name="tear-down", cache_policy=NO_CACHE)
def tear_down(cluster: Cluster) -> None:
    """End all nodes and etcd of the run."""
    cluster.tear_down()


@task(name="collect-report", cache_policy=NO_CACHE)
def collect_report(directory: RunDirectory, closed: Closed, seen: Observation) -> None:
    """Write the run's report and pictures."""
    job, root = str(directory.job_file), str(directory.path.parent)
    again = shlex.join(["elastic-train", "train", job, "--run-id", directory.run, "--runs", root])
    now = time.time()
    reports.write(reports.collect(directory, closed, seen, now=now, resumable_with=again), directory.path)
