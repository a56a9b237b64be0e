"""The registry in MLflow, for those who have one: a registered model a job, the alias `champion`.

The extra `elastic-train[mlflow]` brings its client. A version's run holds files and lineage; which
run of ours it comes from, and the promotions in their order, are tags.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from elastic_core.errors import RefusedInput
from elastic_core.ids import check_name
from tasks.registry.protocol import (
    History,
    Lineage,
    ModelVersion,
    RegistryFailed,
    known,
    numbers,
    of_run,
)

CHAMPION: Final = "champion"
RUN_TAG: Final = "elastic.run"
PROMOTIONS_TAG: Final = "elastic.promotions"
FILES: Final = "model"
LINEAGE: Final = "lineage.json"


class MlflowRegistry:
    """The models of one job in an MLflow server or database.

    Args:
        uri: As MLflow has it: `http://…` or `sqlite:///…`.
        name: Of the job.
        cache: Directory for files that are fetched.
    """

    def __init__(self, uri: str, name: str, cache: Path) -> None:
        self._client = _client(uri)
        self._name = check_name("model", name)
        self._cache = cache / name

    def register(self, files: Path, lineage: Lineage) -> ModelVersion:
        """Log the files in a run of MLflow's, then make it a version."""
        if (registered := of_run(self.versions(), lineage.run)) is not None:
            return registered
        with _told(self._name), tempfile.TemporaryDirectory(prefix="elastic-lineage-") as directory:
            note = Path(directory) / LINEAGE
            note.write_text(lineage.model_dump_json(indent=2))
            run = self._client.create_run(self._experiment(), run_name=lineage.run).info
            for key, value in lineage.metrics.items():
                self._client.log_metric(run.run_id, key, value)
            self._client.log_artifacts(run.run_id, str(files), FILES)
            self._client.log_artifact(run.run_id, str(note))
            self._client.set_terminated(run.run_id)
            version = self._client.create_model_version(
                self._name,
                source=f"{run.artifact_uri}/{FILES}",
                run_id=run.run_id,
                tags={RUN_TAG: lineage.run, "elastic.accepted": str(lineage.is_accepted).lower()},
            )
        return ModelVersion(int(version.version), lineage)

    def versions(self) -> Sequence[ModelVersion]:
        """Return all versions that we registered, the oldest first."""
        with _told(self._name):
            found = list(self._client.search_model_versions(f"name = '{self._name}'"))
            ours = [version for version in found if RUN_TAG in version.tags]
            read = [ModelVersion(int(version.version), self._lineage(version.run_id)) for version in ours]
        return sorted(read, key=lambda version: version.number)

    def champion(self) -> int | None:
        """Return the number that the alias names."""
        with _told(self._name):
            model = self._model()
            return int(model.aliases[CHAMPION]) if model and CHAMPION in model.aliases else None

    def promote(self, number: int) -> None:
        """Note the promotion, then move the alias."""
        known(self.versions(), number, self._name)
        self._point(self._history().promoted(number))

    def rollback(self) -> int:
        """Move the alias back to the champion before."""
        history = self._history().rolled_back(self._name)
        self._point(history)
        return history[-1]

    def fetch(self, number: int) -> Path:
        """Download a version once; a version never changes."""
        known(self.versions(), number, self._name)
        place = self._cache / str(number)
        if place.is_dir():
            return place.absolute()
        with _told(self._name), tempfile.TemporaryDirectory(prefix="elastic-fetch-") as directory:
            run_id = self._client.get_model_version(self._name, str(number)).run_id
            files = self._client.download_artifacts(run_id, FILES, directory)
            draft = place.with_name(f".{number}.{os.getpid()}")
            draft.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(files, draft, dirs_exist_ok=True)
            if not place.is_dir():
                draft.rename(place)
        return place.absolute()

    def _lineage(self, run_id: str) -> Lineage:
        kept = self._cache / f"{run_id}.json"
        if not kept.exists():
            with tempfile.TemporaryDirectory(prefix="elastic-lineage-") as directory:
                file = self._client.download_artifacts(run_id, LINEAGE, directory)
                kept.parent.mkdir(parents=True, exist_ok=True)
                draft = kept.with_name(f".{kept.name}.{os.getpid()}")
                shutil.copyfile(file, draft)
                draft.replace(kept)
        return Lineage.model_validate_json(kept.read_bytes())

    def _history(self) -> History:
        with _told(self._name):
            model = self._model()
            told = numbers(model.tags.get(PROMOTIONS_TAG)) if model else ()
        return History(told, self.champion())

    def _point(self, history: Sequence[int]) -> None:
        with _told(self._name):
            told = ",".join(map(str, history))
            self._client.set_registered_model_tag(self._name, PROMOTIONS_TAG, told)
            self._client.set_registered_model_alias(self._name, CHAMPION, str(history[-1]))

    def _model(self) -> Any:
        """Return the registered model, None if there is none yet."""
        found = list(self._client.search_registered_models(f"name = '{self._name}'"))
        return found[0] if found else None

    def _experiment(self) -> str:
        """Return the id of the job's experiment; make it, and the registered model, if need be."""
        if self._model() is None:
            self._client.create_registered_model(self._name)
        experiment = self._client.get_experiment_by_name(self._name)
        return str(experiment.experiment_id if experiment else self._client.create_experiment(self._name))


def _client(uri: str) -> Any:
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    try:
        from mlflow import MlflowClient  # seconds of import that only its users pay
    except ImportError as error:
        raise RefusedInput(
            ["registry.kind: 'mlflow' needs its client: pip install 'elastic-train[mlflow]'"]
        ) from error
    with _told(uri):
        return MlflowClient(tracking_uri=uri, registry_uri=uri)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """Tell a failure of MLflow as one of the registry."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except (MlflowException, OSError) as error:
        raise RegistryFailed(f"models {name!r}: MLflow: {str(error).splitlines()[0]}") from error
