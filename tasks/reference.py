"""The undisturbed training that a disturbed one is measured against, and the distance between two models."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_core.errors import ElasticError
from elastic_core.model.job import JobSpec


class ReferenceFailed(ElasticError):
    """The undisturbed training broke."""


def train_alone(job: JobSpec, directory: Path) -> Path:
    """Train a job in one process, without agents or changes; return the model's directory.

    Raises:
        ReferenceFailed: The training ended with an error.
    """
    directory.mkdir(parents=True, exist_ok=True)
    job_file = directory / "job.yaml"
    job_file.write_text(job.model_dump_json(indent=2))
    command = [
        sys.executable,
        "-m",
        "elastic_core.trainer",
        "solo",
        str(job_file),
        "--run-dir",
        str(directory),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise ReferenceFailed(f"the undisturbed training ended with {done.returncode}:\n{tail}")
    return directory / "model"


def largest_difference(one: Path, other: Path) -> float:
    """Return the largest absolute difference of any two weights of two exported models.

    Raises:
        ReferenceFailed: The models have different tensors.
    """
    import torch  # seconds of import that only a comparison needs

    first, second = (
        torch.load(directory / "model.pt", weights_only=True, map_location="cpu")
        for directory in (one, other)
    )
    if first.keys() != second.keys():
        names = sorted(first.keys() ^ second.keys())
        raise ReferenceFailed(f"the models have different tensors: {', '.join(names[:5])}")
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)
