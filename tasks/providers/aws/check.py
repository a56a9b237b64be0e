"""What can be wrong with an AWS pool, found before anything is made or billed."""

from __future__ import annotations

import os
from pathlib import Path

from elastic_core.errors import RefusedInput
from elastic_core.model.job import AwsPool, JobSpec, ScriptTraining
from tasks.providers.aws.base import Base, base_of


def check_pool(pool: AwsPool, job: JobSpec) -> None:
    """Refuse a pool on which no node could start, or whose nodes could not see the job's files.

    Raises:
        RefusedInput: All mistakes, one line each.
    """
    base = base_of(pool)
    problems = [*_mount_problems(pool, base), *_path_problems(pool, job), *_price_problems(pool)]
    if problems:
        raise RefusedInput(problems)


def check_runs(pool: AwsPool, runs: Path) -> None:
    """Refuse a directory of runs that nodes do not see.

    Raises:
        RefusedInput: It is not on the cluster's file system.
    """
    if not runs.absolute().is_relative_to(pool.mount):
        raise RefusedInput(
            [
                f"--runs: {str(runs)!r} is not on the cluster's file system, where nodes read and write: "
                f"give --runs {pool.mount}/runs"
            ]
        )


def _mount_problems(pool: AwsPool, base: Base) -> list[str]:
    mount = Path(pool.mount)
    if not mount.is_dir():
        options = f"tls,iam,accesspoint={base.access_point}"
        return [
            f"pool.mount: {pool.mount!r} is no directory here; the flow runs in the cluster's network, "
            f"with its file system mounted: mount -t efs -o {options} {base.file_system}:/ {pool.mount}"
        ]
    if not os.access(mount, os.W_OK):
        return [f"pool.mount: {pool.mount!r} cannot be written: mount it through the base's access point"]
    return []


def _path_problems(pool: AwsPool, job: JobSpec) -> list[str]:
    paths = {"checkpoint.directory": job.checkpoint.directory}
    if isinstance(job.training, ScriptTraining):
        paths["training.script"] = job.training.script
    return [
        f"{field}: {path!r} is not on the cluster's file system, so nodes do not have it: "
        f"put it below {pool.mount}"
        for field, path in paths.items()
        if path and not Path(path).absolute().is_relative_to(pool.mount)
    ]


def _price_problems(pool: AwsPool) -> list[str]:
    if not pool.budget_usd or pool.market == "spot":
        return []
    unknown = [kind for kind in pool.instance_types if kind not in pool.on_demand_usd]
    return [
        f"pool.on_demand_usd: has no price of {kind!r}, and a budget needs one: add it, in dollars an hour"
        for kind in unknown
    ]
