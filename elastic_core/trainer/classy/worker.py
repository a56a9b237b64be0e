"""A worker that trains a Classy Vision job, with an agent or alone."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
import torch

from elastic_core.clock import SystemClock
from elastic_core.errors import RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.model.job_file import load_job
from elastic_core.trainer.checkpoint_url import open_checkpoints
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.classy.compat import ClassyTrainer
from elastic_core.trainer.classy.datasets import register_user_package
from elastic_core.trainer.classy.recipe import resolve
from elastic_core.trainer.classy.solo import train_alone
from elastic_core.trainer.classy.trainee import ClassyTrainee
from elastic_core.trainer.loop import LoopSettings, TrainingEnd, train
from elastic_core.trainer.session import Session

JOB: Final = "ELASTIC_JOB"
"""Environment variable: path of the job's file."""

log = structlog.get_logger(__name__)


class ElasticTrainer(ClassyTrainer):  # type: ignore[misc]  # Classy Vision has no types
    """Classy Vision's trainer on the elastic loop: trains a trainee as this node's agent orders."""

    def __init__(self, job: JobSpec, environment: Mapping[str, str]) -> None:
        super().__init__()
        self._job = job
        self._environment = environment
        self._clock = SystemClock()

    def train(self, trainee: ClassyTrainee) -> TrainingEnd:
        """Train until the job is complete or a stop was asked for; to be called by the main thread.

        Raises:
            LinkLost: The agent is gone.
        """
        for phase, dataset in trainee.task.datasets.items():
            processes = trainee.loader_processes(phase)
            log.info("data", phase=phase, samples=len(dataset), loader_processes=processes)
        settings = self._settings(trainee)
        with Session.connect(self._environment, clock=self._clock) as session:
            writer = self._writer(settings.run_dir)
            return train(trainee, session, settings=settings, writer=writer, clock=self._clock)

    def _settings(self, trainee: ClassyTrainee) -> LoopSettings:
        assert isinstance(self._job.training, ClassyTraining)
        digests = json.dumps(trainee.recipe.digests(), sort_keys=True)
        return LoopSettings.from_environment(
            self._environment,
            checkpoint=self._job.checkpoint,
            resume=self._job.resume,
            audit=self._job.training.elastic.audit_samples,
            config=hashlib.sha256(digests.encode()).hexdigest()[:16],
            backend="nccl" if trainee.device.type == "cuda" else "gloo",
        )

    def _writer(self, run_dir: Path | None) -> CheckpointWriter | None:
        policy = self._job.checkpoint
        if not policy.directory and run_dir is None:
            return None
        place = policy.directory if policy.directory or run_dir is None else run_dir / "checkpoints"
        return CheckpointWriter(open_checkpoints(place, keep=policy.keep), clock=self._clock)


def build_trainee(
    job: JobSpec, base: Path, *, local_rank: int = 0, run_dir: Path | None = None
) -> ClassyTrainee:
    """Return the trainee of a job, not set up yet; relative paths start from `base`.

    Raises:
        RefusedInput: The job is no Classy Vision job, or names what cannot be found.
    """
    if isinstance(job.training, ClassyTraining):
        register_user_package(job.training.user_package)
    cpus = (os.cpu_count() or 1) // job.workers_per_node
    return ClassyTrainee(resolve(job, base), cpus=max(1, cpus), local_rank=local_rank, run_dir=run_dir)


def run_worker(environment: Mapping[str, str]) -> ExitCode:
    """Train the job that the agent's variables name and return the exit code.

    Raises:
        RefusedInput: There is no job, or it cannot be trained.
        LinkLost: The agent is gone.
    """
    path = environment.get(JOB, "")
    if not path:
        raise RefusedInput([f"{JOB} is not set: start this by an agent with --job, or use `solo JOB.yaml`"])
    job = load_job(Path(path))
    run_dir = environment.get("ELASTIC_RUN_DIR", "")
    trainee = build_trainee(
        job,
        Path.cwd(),
        local_rank=int(environment.get("LOCAL_RANK", "0")),
        run_dir=Path(run_dir) if run_dir else None,
    )
    return ElasticTrainer(job, environment).train(trainee).value


def run_solo(job: JobSpec, base: Path, run_dir: Path) -> Mapping[str, float]:
    """Train a job in this process alone and return its results."""
    torch.set_num_threads(1)  # as workers have it: sums depend on the number of threads
    return train_alone(build_trainee(job, base, run_dir=run_dir), run_dir)
