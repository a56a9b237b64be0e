"""The steps of retraining as Prefect tasks: safe to run twice, visible in the UI."""

from __future__ import annotations

import hashlib
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from prefect import task
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE

from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.quality.data import DataPrint
from elastic_core.quality.gate import Gate, judge
from elastic_core.quality.score import Score
from tasks import comparison as comparisons
from tasks import data, runs, scoring, validate
from tasks.comparison import Comparison
from tasks.prefect_server import HOME
from tasks.registry.protocol import Lineage, ModelVersion, Registry
from tasks.runs import RunDirectory

DATA_FILE: Final = "data.json"
"""In a run's directory: the fingerprint of the data that it trains on."""
JUDGED_FILE: Final = "judged.txt"
"""In a run's directory, written last: its model is registered, and promoted if the gate let it."""


def recipe_of(job: JobSpec) -> str:
    """Return a digest of what a job trains and how, whatever model it begins with."""
    assert isinstance(job.training, ClassyTraining)
    told = job.training.model_dump(mode="json", exclude={"warm_start"})
    return hashlib.blake2b(json.dumps(told, sort_keys=True).encode(), digest_size=16).hexdigest()


@task(name="read-job", cache_policy=NO_CACHE)
def read_job(job: JobSpec) -> JobSpec:
    """Return the job with its files read in."""
    return validate.resolve(job)


@task(name="look-at-data", cache_policy=NO_CACHE)
def look_at_data(job: JobSpec) -> DataPrint:
    """Return the fingerprint of the job's data."""
    return data.fingerprint(job, HOME / "fingerprints")


def news(job: JobSpec, found: DataPrint, tried: ModelVersion | None) -> str:
    """Return what is new since the version that was tried last, "" if it would be trained once more.

    A version that the gate refused was tried, too: the same data are not trained every night.
    """
    if tried is None:
        return found.news_since(None)
    if fresh := found.news_since(tried.lineage.data):
        return fresh
    return "" if tried.lineage.recipe == recipe_of(job) else "the job trains in another way than before"


@task(name="find-unjudged-run", cache_policy=NO_CACHE)
def find_unjudged_run(root: Path, job: JobSpec, found: DataPrint) -> RunDirectory | None:
    """Return a run of this job on these very data that was begun and never judged: it is gone on with."""
    for directory in runs.all_runs(root):
        data_file = directory.path / DATA_FILE
        if (directory.path / JUDGED_FILE).exists() or not data_file.exists():
            continue
        is_same = data_file.read_text() == found.model_dump_json()
        if is_same and not runs.differences(directory.job(), job):
            return directory
    return None


@task(name="make-run", cache_policy=NO_CACHE)
def make_run(root: Path, job: JobSpec, found: DataPrint) -> RunDirectory:
    """Return the directory of a new run on these data."""
    fresh = job.model_copy(update={"resume": "never"})
    directory = runs.choose_run(root, fresh, now=datetime.now(UTC))
    (directory.path / DATA_FILE).write_text(found.model_dump_json())
    return directory


@task(name="score-model", task_run_name="score-{name}", cache_policy=NO_CACHE)
def score_model(job: JobSpec, model: Path, *, name: str) -> Score:  # noqa: ARG001 - names the task's run
    """Try a model on the job's held-out data."""
    return scoring.score(job, model)


def compare(
    job: JobSpec, directory: RunDirectory, *, gate: Gate, news: str, champion: tuple[int, Path] | None
) -> Comparison:
    """Try the champion and the run's model on the same held-out data, and let the gate decide."""
    challenger = score_model(job, directory.path / "model", name="challenger")
    old = score_model(job, champion[1], name="champion") if champion else None
    return Comparison(
        job=job.name,
        run=directory.run,
        news=news,
        gate=gate,
        verdict=judge(gate, challenger, old),
        challenger=challenger,
        champion=old,
        champion_number=champion[0] if champion else None,
    )


def keep(
    registry: Registry, job: JobSpec, directory: RunDirectory, found: DataPrint, told: Comparison
) -> ModelVersion:
    """Register the run's model with its comparison and, if the gate lets it, make it champion.

    Prefect hears of it as an asset: the model, made of the data.
    """
    model = directory.path / "model"
    comparisons.write(told, model)
    lineage = Lineage(
        job=job.name,
        run=directory.run,
        data=found,
        recipe=recipe_of(job),
        parent=told.champion_number,
        metrics={"accuracy": told.challenger.accuracy},
        is_accepted=told.verdict.is_promoted,
        reasons=told.verdict.reasons,
        created_at=time.time(),
    )

    @materialize(
        f"elastic://models/{job.name}",
        asset_deps=[f"elastic://data/{job.name}"],
        name="register-model",
        cache_policy=NO_CACHE,
    )
    def register_model() -> int:
        number = registry.register(model, lineage).number
        if lineage.is_accepted:
            registry.promote(number)
        (directory.path / JUDGED_FILE).write_text("\n".join(lineage.reasons) + "\n")
        return number

    return ModelVersion(register_model(), lineage)
