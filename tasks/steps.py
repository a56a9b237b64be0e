"""The flow's steps as Prefect tasks: one call each, safe to run twice, visible in the UI."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from prefect import task
from prefect.cache_policies import NO_CACHE

from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Closed
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
    report = {"run": directory.run, "attempt": directory.attempt(), "state": closed.outcome}
    report |= {"exit_code": closed.exit_code, "reason": closed.reason, "generations": len(seen.history)}
    directory.report_file.write_text(json.dumps(report, indent=2))
