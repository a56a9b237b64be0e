"""Check a job before anything is created: every mistake at once, and only once for the same job.

A Classy Vision config can only be judged by building it, which costs seconds of
imports; a child process does that, and remembers a job that passed. Whether its
data are there is looked up every time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Final

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.model.job import (
    AwsPool,
    ClassyTraining,
    DirectoryMount,
    DockerPool,
    JobSpec,
    LocalPool,
    ScriptTraining,
)
from elastic_core.store.server import find_etcd
from elastic_core.trainer.classy.recipe import read_config
from tasks.etcd_external import check_source, files_of, resolve_source

DEADLINE_S: Final = 120.0


class ValidationFailed(ElasticError):
    """The validation itself broke; the job may be good."""


def resolve(job: JobSpec) -> JobSpec:
    """Return the job with its files read in, so that it means the same on every machine and later.

    Raises:
        RefusedInput: A named file cannot be read.
    """
    job = _with_warm_start(_with_base(_with_etcd(job)))
    match job.training:
        case ClassyTraining(config=str()):
            training = job.training.model_copy(update={"config": read_config(job.training, Path())})
            return job.model_copy(update={"training": training})
        case ScriptTraining(script=script, entry="script"):
            if not Path(script).is_file():
                raise RefusedInput([f"training.script: {script!r} is not a file; give the path of a script"])
            _compile(Path(script))
            absolute = job.training.model_copy(update={"script": str(Path(script).absolute())})
            return _with_directory(
                job.model_copy(update={"training": absolute}), Path(script).absolute().parent
            )
        case _:
            return job


def check(job: JobSpec, home: Path) -> None:
    """Refuse a job that cannot train.

    Args:
        job: A resolved job.
        home: Directory under which passed jobs are remembered.

    Raises:
        RefusedInput: All mistakes, one line each.
        ValidationFailed: The check broke or took longer than two minutes.
    """
    _check_pool(job)
    _judge(job, home / "validated")


def _check_pool(job: JobSpec) -> None:
    check_source(job)
    match job.pool:
        case DockerPool() as pool:
            from tasks.providers.docker_check import check_pool

            check_pool(pool, job.checkpoint)
        case LocalPool():
            if not job.etcd.endpoints:
                find_etcd()
        case AwsPool() as aws:
            from tasks.providers.aws import check as aws_check

            aws_check.check_pool(aws, job)


def check_runs(job: JobSpec, runs: Path) -> None:
    """Refuse a directory of runs that the job's nodes could not see.

    Raises:
        RefusedInput: It is elsewhere.
    """
    if isinstance(job.pool, AwsPool):
        from tasks.providers.aws import check as aws_check

        aws_check.check_runs(job.pool, runs)


def _with_base(job: JobSpec) -> JobSpec:
    """Return the job with its base found from any directory."""
    if not isinstance(job.pool, AwsPool):
        return job
    from tasks.providers.aws.base import base_file

    pool = job.pool.model_copy(update={"base": str(base_file(job.pool).absolute())})
    return job.model_copy(update={"pool": pool})


def _with_warm_start(job: JobSpec) -> JobSpec:
    """Return the job with the model that it begins with under one path on all its nodes."""
    if not isinstance(job.training, ClassyTraining) or not job.training.warm_start:
        return job
    model = Path(job.training.warm_start).absolute()
    training = job.training.model_copy(update={"warm_start": str(model)})
    return _with_directory(job.model_copy(update={"training": training}), model)


def _with_etcd(job: JobSpec) -> JobSpec:
    """Return the job with the files by which nodes enter an external etcd seen by them, too."""
    job = job.model_copy(update={"etcd": resolve_source(job.etcd)})
    for file in files_of(job.etcd):
        job = _with_directory(job, file.parent)
    return job


def _with_directory(job: JobSpec, directory: Path) -> JobSpec:
    """Return the job with a directory seen by its nodes at the same path."""
    pool = job.pool
    if not isinstance(pool, DockerPool) or any(
        directory.is_relative_to(mount.target) for mount in pool.mounts
    ):
        return job
    mount = DirectoryMount(source=str(directory), target=str(directory))
    return job.model_copy(update={"pool": pool.model_copy(update={"mounts": (*pool.mounts, mount)})})


def _compile(script: Path) -> None:
    """Refuse a script that Python cannot read: every node would start only to find that out."""
    try:
        with warnings.catch_warnings(action="ignore"):
            compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        raise RefusedInput([f"training.script: {str(script)!r}: {error.strerror}"]) from error
    except (SyntaxError, ValueError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        what = error.msg if isinstance(error, SyntaxError) else error
        raise RefusedInput([f"training.script: {str(script)!r}{where}: {what}; mend the script"]) from error


def _judge(job: JobSpec, cache: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="elastic-validate-") as directory:
        file = Path(directory) / "job.yaml"
        file.write_text(job.model_dump_json())
        command = [sys.executable, "-m", "elastic_core.trainer", "validate", str(file), "--json"]
        command += ["--cache", str(cache)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ValidationFailed(f"the check of the config took longer than {DEADLINE_S:.0f} s") from error
    try:
        problems = json.loads(done.stdout.strip().splitlines()[-1])["problems"]
    except (ValueError, KeyError, IndexError) as error:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise ValidationFailed(f"the check of the config broke (exit {done.returncode}):\n{tail}") from error
    if problems:
        raise RefusedInput(problems)
