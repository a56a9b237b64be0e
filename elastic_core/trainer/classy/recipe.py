"""What a job trains, resolved: the Classy Vision config, the global batch, the seed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec, Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Everything that decides what the trained model is; machines are not among it.

    Attributes:
        config: The Classy Vision config, as the user wrote it.
        global_batch: Samples in one optimizer step at every world size.
        shards: Fixed slices of a global batch.
        deterministic: Whether gradients are summed in one fixed order.
        precision: What the model computes in; its weights are float32 always.
        non_finite: What to do with a step whose loss or gradient is no number.
        warm_start: Directory of an exported model to begin with, "" to begin anew.
    """

    config: Mapping[str, Any]
    global_batch: int
    shards: int
    seed: int
    deterministic: bool = False
    precision: Precision = "float32"
    non_finite: Literal["stop", "skip"] = "stop"
    warm_start: str = ""

    def digests(self) -> dict[str, str]:
        """Return a short digest for each section of the config that decides what is learned."""
        sections = ("name", "num_epochs", "model", "dataset", "optimizer", "loss", "mixup", "clip_grad_norm")
        digests = {section: _digest(_essence(self.config.get(section))) for section in sections}
        return digests | {"precision": self.precision}


def read_config(training: ClassyTraining, base: Path) -> dict[str, Any]:
    """Return the Classy Vision config of a job; a relative path starts from `base`.

    Raises:
        RefusedInput: The file is missing, or is not a JSON object.
    """
    if not isinstance(training.config, str):
        return dict(training.config)
    path = base / training.config
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise RefusedInput(
            [f"training.config: {str(path)!r}: {error.strerror}; give the path of a JSON config"]
        ) from error
    except ValueError as error:
        raise RefusedInput([f"training.config: {str(path)!r} is not JSON: {error}"]) from error
    if not isinstance(config, dict):
        raise RefusedInput(
            [f"training.config: {str(path)!r} must hold an object, not {type(config).__name__}"]
        )
    return config


def resolve(job: JobSpec, base: Path) -> Recipe:
    """Return the recipe of a job.

    Raises:
        RefusedInput: The job trains a script, or its config cannot be read.
    """
    if not isinstance(job.training, ClassyTraining):
        raise RefusedInput([f"training.kind: is {job.training.kind!r}; only 'classy' has a recipe"])
    config, options = read_config(job.training, base), job.training.elastic
    warm_start = job.training.warm_start
    return Recipe(
        config=config,
        global_batch=options.global_batch or default_global_batch(config, job),
        shards=options.virtual_shards,
        seed=options.seed,
        deterministic=options.deterministic,
        precision=options.precision,
        non_finite=options.non_finite,
        warm_start=str(base / warm_start) if warm_start else "",
    )


def default_global_batch(config: Mapping[str, Any], job: JobSpec) -> int:
    """Return what Classy Vision itself would use on the target's workers.

    That is `simulated_global_batchsize` if given, else a replica's batch times the workers.
    """
    simulated = config.get("simulated_global_batchsize")
    if simulated:
        return int(simulated)
    workers = job.nodes.target * job.workers_per_node
    return int(config["dataset"]["train"]["batchsize_per_replica"]) * workers


def _essence(section: Any) -> Any:
    """Leave out what only says how data are fetched."""
    if isinstance(section, Mapping):
        return {key: _essence(value) for key, value in section.items() if key != "num_workers"}
    return section


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
