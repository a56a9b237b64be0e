"""A trained model on held-out data: each sample once, prepared as the model was trained to get it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Final

import torch
from torch.utils.data import DataLoader

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.quality.score import Score, score_of
from elastic_core.trainer.classy.compat import build_dataset
from elastic_core.trainer.classy.datasets import register_user_package
from elastic_core.trainer.classy.export import ExportedModel, load_exported, preprocessing_of
from elastic_core.trainer.classy.recipe import read_config

_MOST_PROCESSES: Final = 4


def score_model(job: JobSpec, base: Path, directory: Path) -> Score:
    """Try an exported model on the held-out data of a job; relative paths start from `base`.

    Labels are matched by the names of their classes, so that a model that knows fewer or more of
    them is judged by what it should have named.

    Raises:
        RefusedInput: The job has no held-out data, or the directory no model.
    """
    if not isinstance(job.training, ClassyTraining):
        raise RefusedInput([f"training.kind: is {job.training.kind!r}; only 'classy' has held-out data"])
    register_user_package(job.training.user_package)
    section = read_config(job.training, base)["dataset"].get("test")
    if section is None:
        raise RefusedInput(["training.config.dataset.test: is required to judge a model: hold data out"])
    exported = load_exported(directory)
    data = build_dataset({**section, "transforms": preprocessing_of(directory)})
    targets, outputs, width = _classify(exported, data, int(section["batchsize_per_replica"]))
    own = tuple(getattr(data, "classes", ())) or _numbered(max([width - 1, *targets]) + 1)
    known = exported.classes or own
    known = (*known, *_numbered(width)[len(known) :])
    classes = (*own, *(name for name in known if name not in own))
    return score_of(targets, [classes.index(known[output]) for output in outputs], classes)


def _classify(exported: ExportedModel, data: Any, batch: int) -> tuple[list[int], list[int], int]:
    """Return the label of each sample, the model's highest output for it, and how many outputs it has."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = exported.model.to(device)
    pairs: list[tuple[Sequence[int], Sequence[int], int]] = []
    with torch.no_grad():
        for sample in _batches(data, batch):
            output = model(sample["input"].to(device))
            pairs.append((sample["target"].tolist(), output.argmax(1).tolist(), output.shape[1]))
    targets = list(chain.from_iterable(pair[0] for pair in pairs))
    outputs = list(chain.from_iterable(pair[1] for pair in pairs))
    return targets, outputs, pairs[0][2] if pairs else 1


def _batches(data: Any, batch: int) -> Iterator[Any]:
    in_memory = getattr(data, "in_memory", False)
    processes = 0 if in_memory else min(_MOST_PROCESSES, (os.cpu_count() or 1) - 1)
    return iter(DataLoader(data, batch_size=batch, num_workers=processes))


def _numbered(count: int) -> tuple[str, ...]:
    return tuple(map(str, range(count)))
