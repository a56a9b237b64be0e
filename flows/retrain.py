"""The flow `elastic-retrain`: new data, a warm start, an elastic training, and a gate before promotion.

Made for a schedule: where nothing is new, nothing is trained. Whatever it began and did not finish
is gone on with by the next one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.states import Completed
from pydantic import Field

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.model.membership import Outcome
from elastic_core.quality.gate import Gate
from flows.audience import Audience, RunEnd, RunSnapshot, audience, listening
from flows.train import elastic_train
from tasks import comparison as comparisons
from tasks import retraining
from tasks.prefect_server import HOME
from tasks.registry.choice import Choice, DirectoryChoice, open_registry
from tasks.registry.protocol import ModelVersion, Registry
from tasks.runs import RUNS, RunDirectory

REFUSED: Final = "Refused"
"""Name of the state of a retraining whose model the gate did not promote."""

_JOB: Final = JobSpec()
_GATE: Final = Gate()
_REGISTRY: Final = DirectoryChoice()


@flow(name="elastic-retrain", flow_run_name="retrain-{job.name}", retries=0)
def elastic_retrain(
    job: JobSpec = _JOB,
    gate: Annotated[Gate, Field(description="What the new model must be to be promoted.")] = _GATE,
    registry: Annotated[Choice, Field(description="Where models are kept.")] = _REGISTRY,
    force: Annotated[bool, Field(description="Train even where nothing is new.")] = False,
    runs: Annotated[str, Field(description="Directory of all runs' directories.")] = str(RUNS),
) -> Any:
    """Train a job again if there is something new, and promote the model if it is good enough.

    Args:
        job: What to train, and on what.
        gate: What the new model must be to be promoted.
        registry: Where models are kept.
        force: Train even where nothing is new.
        runs: Directory of all runs' directories.
    """
    root = Path(runs)
    job = _checked(retraining.read_job(job))  # `elastic-train` judges all of it
    models = open_registry(registry, job.name, HOME)
    found = retraining.look_at_data(job)
    champion = models.champion()
    job = _warm(job, models, champion)
    versions = models.versions()
    news = retraining.news(job, found, versions[-1] if versions else None)
    directory = retraining.find_unjudged_run(root, job, found)
    if directory is None:
        if not news and not force:
            return _nothing_new(versions[-1], champion)
        directory = retraining.make_run(root, job, found)
    _say(f"training: {news or 'nothing is new, but it was asked for'}")
    ended = _train(job, directory, runs)
    if ended is not None:
        return ended
    told = retraining.compare(
        job,
        directory,
        gate=gate,
        news=news or "nothing",
        champion=None if champion is None else (champion, models.fetch(champion)),
    )
    version = retraining.keep(models, job, directory, found, told)
    return _show(told, models, version)


def _checked(job: JobSpec) -> JobSpec:
    """Return the job if models of it can be compared.

    Raises:
        RefusedInput: They cannot.
    """
    if not isinstance(job.training, ClassyTraining) or not isinstance(job.training.config, dict):
        raise RefusedInput(["training.kind: retraining compares models on held-out data: use 'classy'"])
    if job.training.config["dataset"].get("test") is None:
        raise RefusedInput(["training.config.dataset.test: is required to compare models: hold data out"])
    return job


def _warm(job: JobSpec, models: Registry, champion: int | None) -> JobSpec:
    """Return the job as it begins with the champion, if there is one."""
    if champion is None:
        return job
    training = job.training.model_copy(update={"warm_start": str(models.fetch(champion))})
    return job.model_copy(update={"training": training})


def _train(job: JobSpec, directory: RunDirectory, runs: str) -> Any:
    """Train elastically; return the state of a training that did not succeed, None if it did."""
    keeper = _Keeper(audience())
    with listening(keeper):
        state: Any = elastic_train(job, run_id=directory.run, runs=runs, return_state=True)
    return None if keeper.outcome is Outcome.SUCCEEDED else state


def _nothing_new(tried: ModelVersion, champion: int | None) -> Any:
    told = f"nothing is new since version {tried.number}: nothing is trained"
    _say(f"{told}; champion: {'none' if champion is None else f'version {champion}'}")
    return Completed(name="NothingNew", message=told)


def _show(told: comparisons.Comparison, models: Registry, version: ModelVersion) -> Any:
    """Show the comparison in the UI, and end as the gate decided."""
    page = comparisons.markdown(told, models.fetch(version.number), version=version.number)
    create_markdown_artifact(page, key=f"{told.job}-comparison", description="Champion and challenger")
    message = f"version {version.number} {told.headline}"
    _say(message)
    return Completed(name="Promoted" if told.verdict.is_promoted else REFUSED, message=message)


def _say(sentence: str) -> None:
    get_run_logger().info("%s", sentence)
    audience().decided(sentence)


class _Keeper:
    """Keeps how the training ended, and passes everything on."""

    def __init__(self, listener: Audience) -> None:
        self.outcome: Outcome | None = None
        self._listener = listener

    def decided(self, sentence: str) -> None:
        """Pass on."""
        self._listener.decided(sentence)

    def saw(self, snapshot: RunSnapshot) -> None:
        """Pass on."""
        self._listener.saw(snapshot)

    def ended(self, end: RunEnd) -> None:
        """Keep, and pass on."""
        self.outcome = end.outcome
        self._listener.ended(end)
