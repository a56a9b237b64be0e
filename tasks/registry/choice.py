"""Which registry a person chose, as a typed parameter and as a word on the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.registry.directory import DirectoryRegistry
from tasks.registry.mlflow import MlflowRegistry
from tasks.registry.protocol import Registry

MODELS: Final = "models"


class DirectoryChoice(BaseModel):
    """Versions are directories."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Directory")

    kind: Literal["directory"] = "directory"
    path: str = Field(MODELS, min_length=1, description="Directory of all jobs' models.")


class MlflowChoice(BaseModel):
    """Versions are in an MLflow server or database."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="MLflow")

    kind: Literal["mlflow"] = "mlflow"
    uri: str = Field(
        "http://127.0.0.1:5000", pattern=r"^(https?|sqlite)://", description="Address of the server."
    )


Choice = Annotated[DirectoryChoice | MlflowChoice, Field(discriminator="kind")]


def chosen(word: str) -> DirectoryChoice | MlflowChoice:
    """Return what a word of the command line means: an address is MLflow's, all else a directory."""
    return MlflowChoice(uri=word) if "://" in word else DirectoryChoice(path=word)


def open_registry(choice: DirectoryChoice | MlflowChoice, name: str, home: Path) -> Registry:
    """Return the registry of a job's models.

    Raises:
        RefusedInput: MLflow is asked for and its client is not installed.
        RegistryFailed: It does not answer.
    """
    match choice:
        case DirectoryChoice(path=path):
            return DirectoryRegistry(Path(path), name)
        case MlflowChoice(uri=uri):
            return MlflowRegistry(uri, name, home / "mlflow")
