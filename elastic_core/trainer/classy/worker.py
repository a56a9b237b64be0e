"""A worker that trains a Classy Vision job, with an agent or alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.trainer.classy.datasets import register_user_package
from elastic_core.trainer.classy.recipe import resolve
from elastic_core.trainer.classy.solo import train_alone
from elastic_core.trainer.classy.trainee import ClassyTrainee


def build_trainee(job: JobSpec, base: Path) -> ClassyTrainee:
    """Return the trainee of a job, not set up yet; relative paths start from `base`.

    Raises:
        RefusedInput: The job is no Classy Vision job, or names what cannot be found.
    """
    if isinstance(job.training, ClassyTraining):
        register_user_package(job.training.user_package)
    return ClassyTrainee(resolve(job, base))


def run_solo(job: JobSpec, base: Path, run_dir: Path) -> Mapping[str, float]:
    """Train a job in this process alone and return its results."""
    torch.set_num_threads(1)  # as workers have it: sums depend on the number of threads
    return train_alone(build_trainee(job, base), run_dir)
