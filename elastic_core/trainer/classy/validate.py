"""Every mistake of a job's training at once, before anything is started for it.

Reading comes first and costs nothing; building and rehearsing cost seconds of imports, so a job
that was good is remembered by the digest of everything that the verdict depends on.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec, ScriptTraining
from elastic_core.trainer.classy import schema
from elastic_core.trainer.classy.recipe import default_global_batch, read_config
from elastic_core.trainer.classy.script import find_script_problems

_DECIDING: Final = ("torch", "torchvision", "classy-vision", "numpy")
"""Distributions whose version may change a verdict."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What was found: problems, or a line that says what will be trained."""

    problems: tuple[str, ...]
    summary: str = ""


def validate_training(job: JobSpec, base: Path) -> list[str]:
    """Return every mistake of a job's training, one line each; relative paths start from `base`."""
    return list(judge(job, base).problems)


def judge(job: JobSpec, base: Path, *, cache: Path | None = None) -> Verdict:
    """Judge a job's training.

    Args:
        job: The job.
        base: Directory that relative paths start from.
        cache: Directory that remembers good jobs. Whether data are there is looked up every time.
    """
    outside = [*_checkpoint_problems(job, base), *_warm_start_problems(job, base)]
    if isinstance(job.training, ScriptTraining):
        problems = [*find_script_problems(job.training, base), *outside]
        return Verdict(tuple(problems), f"script {job.training.script} compiles")
    try:
        config = read_config(job.training, base)
    except RefusedInput as refusal:
        return Verdict((*refusal.problems, *outside))
    problems = [*schema.find_problems(config, base), *_elastic_problems(config, job), *outside]
    problems = list(dict.fromkeys([*problems, *schema.missing_paths(config, base)]))
    if problems:
        return Verdict(tuple(problems))
    return _judge_by_building(job, config, base, cache)


def _judge_by_building(job: JobSpec, config: dict[str, Any], base: Path, cache: Path | None) -> Verdict:
    known = cache / f"{_digest(job, config, base)}.json" if cache is not None else None
    if known is not None and known.exists():
        return Verdict((), json.loads(known.read_text())["summary"])
    verdict: Verdict = import_module("elastic_core.trainer.classy.building").judge_built(job, base)
    if known is not None and not verdict.problems:
        known.parent.mkdir(parents=True, exist_ok=True)
        known.write_text(json.dumps({"summary": verdict.summary}))
    return verdict


def _elastic_problems(config: dict[str, Any], job: JobSpec) -> Iterator[str]:
    assert isinstance(job.training, ClassyTraining)
    options = job.training.elastic
    try:
        batch = options.global_batch or default_global_batch(config, job)
    except (KeyError, TypeError, ValueError):
        return  # the section that it comes from is a problem already
    if 0 < batch < options.virtual_shards:
        yield (
            f"training.elastic.global_batch: is {batch}, less than the {options.virtual_shards} virtual "
            "shards that it is cut into: raise it or lower virtual_shards"
        )


def _checkpoint_problems(job: JobSpec, base: Path) -> Iterator[str]:
    """Try to write where checkpoints will be, or into the nearest directory above that is there."""
    if not job.checkpoint.directory:
        return
    place = base / job.checkpoint.directory
    while not place.exists():
        place = place.parent
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        yield (
            f"checkpoint.directory: {job.checkpoint.directory!r} cannot be written "
            f"({place}: {error.strerror}); give a directory that every node can write to"
        )


def _warm_start_problems(job: JobSpec, base: Path) -> Iterator[str]:
    warm_start = getattr(job.training, "warm_start", "")
    if warm_start and not (base / warm_start / "model.pt").is_file():
        yield (
            f"training.warm_start: {warm_start!r} holds no exported model (model.pt); give the `model` "
            "directory of a finished run"
        )


def _digest(job: JobSpec, config: dict[str, Any], base: Path) -> str:
    """Return a name for everything that a verdict depends on."""
    digest = hashlib.sha256(job.model_dump_json().encode())
    digest.update(json.dumps(config, sort_keys=True).encode())
    digest.update(str(base.absolute()).encode())
    digest.update(sys.version.encode())
    for distribution in _DECIDING:
        digest.update(f"{distribution}=={version(distribution)}".encode())
    packages = ["elastic_core.trainer"]
    if isinstance(job.training, ClassyTraining) and job.training.user_package:
        packages += [name.strip().split(".")[0] for name in job.training.user_package.split(",")]
    for file in (file for package in packages for file in _files_of(package)):
        digest.update(f"{file}:{hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    return digest.hexdigest()[:32]


def _files_of(package: str) -> list[Path]:
    try:
        spec = find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    places = [Path(place) for place in spec.submodule_search_locations or ()]
    files = [file for place in places for file in place.rglob("*.py")]
    return sorted(files) or ([Path(spec.origin)] if spec.origin else [])
