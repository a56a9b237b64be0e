"""A registry of models: numbered versions that never change, and one of them that is champion.

The champion is one pointer, moved in one step. Beside it lies the history of promotions, written
before the pointer moves: where it says more than the pointer, a promotion was cut off, and the
pointer is right.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.quality.data import DataPrint


class RegistryFailed(ElasticError):
    """The registry could not do what was asked: look at where it is kept."""


class Lineage(BaseModel):
    """Where a model comes from, and what the gate said of it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    job: str
    run: str = Field(description="The run that trained it; a run is registered once.")
    data: DataPrint
    recipe: str = Field(description="Digest of what was trained, and how.")
    parent: int | None = Field(None, description="Version that it was warm-started from.")
    metrics: Mapping[str, float] = Field(default_factory=dict)
    is_accepted: bool = Field(description="Whether the gate let it through.")
    reasons: tuple[str, ...] = Field((), description="What the gate said.")
    created_at: float = Field(description="Wall-clock seconds.")


@dataclass(frozen=True, slots=True)
class ModelVersion:
    """One registered model."""

    number: int
    lineage: Lineage


class Registry(Protocol):
    """The models of one job. Every call may be repeated."""

    def register(self, files: Path, lineage: Lineage) -> ModelVersion:
        """Keep a model's files under the next number; of a run that is known, return its version.

        Args:
            files: Directory of an exported model, with whatever else is to be kept beside it.
            lineage: Where it comes from.

        Raises:
            RegistryFailed: It cannot be kept; nothing of it is visible.
        """
        ...

    def versions(self) -> Sequence[ModelVersion]:
        """Return all versions, the oldest first."""
        ...

    def champion(self) -> int | None:
        """Return the number of the version that is to be used, None before the first promotion."""
        ...

    def promote(self, number: int) -> None:
        """Make a version champion, in one step for whoever reads it.

        Raises:
            RefusedInput: There is no such version.
        """
        ...

    def rollback(self) -> int:
        """Make the champion before this one champion again; return its number.

        Raises:
            RefusedInput: There was none before.
        """
        ...

    def fetch(self, number: int) -> Path:
        """Return a directory of this machine that holds a version's files.

        Raises:
            RefusedInput: There is no such version.
        """
        ...


class History:
    """Promotions in their order, as far as the pointer confirms them."""

    def __init__(self, told: Sequence[int], champion: int | None) -> None:
        last = max((place for place, number in enumerate(told) if number == champion), default=-1)
        self.numbers = tuple(told[: last + 1])

    def promoted(self, number: int) -> tuple[int, ...]:
        """Return the history with another promotion; promoting the champion again adds nothing."""
        return self.numbers if self.numbers[-1:] == (number,) else (*self.numbers, number)

    def rolled_back(self, name: str) -> tuple[int, ...]:
        """Return the history without its last promotion.

        Raises:
            RefusedInput: There is no champion to go back to.
        """
        if len(self.numbers) < 2:
            raise RefusedInput([f"models {name!r}: there is no champion before this one to go back to"])
        return self.numbers[:-1]


def known(versions: Sequence[ModelVersion], number: int, name: str) -> ModelVersion:
    """Return the version of a number.

    Raises:
        RefusedInput: There is none; the message names those that exist.
    """
    for version in versions:
        if version.number == number:
            return version
    there = ", ".join(str(version.number) for version in versions) or "none yet"
    raise RefusedInput([f"models {name!r}: there is no version {number}; versions: {there}"])


def of_run(versions: Sequence[ModelVersion], run: str) -> ModelVersion | None:
    """Return the version that a run trained, None if it is not registered."""
    return next((version for version in versions if version.lineage.run == run), None)


def numbers(text: Any) -> tuple[int, ...]:
    """Read a history from its text form: numbers with commas between them."""
    return tuple(int(part) for part in str(text or "").split(",") if part.strip())
