"""What a model does with held-out data: a confusion matrix, and the figures that follow from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Score(BaseModel):
    """One model on one held-out set.

    Raises:
        pydantic.ValidationError: The matrix does not fit the classes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    classes: tuple[str, ...] = Field(min_length=1, description="Names, in the order of the matrix.")
    confusion: tuple[tuple[int, ...], ...] = Field(
        description="Samples by their own class (rows) and the one that the model named (columns)."
    )

    @model_validator(mode="after")
    def _square(self) -> Self:
        size = len(self.classes)
        if len(self.confusion) != size or any(len(row) != size for row in self.confusion):
            raise ValueError(f"the confusion matrix must have {size} rows and columns, one a class")
        return self

    @property
    def samples(self) -> int:
        """Held-out samples."""
        return sum(map(sum, self.confusion))

    @property
    def correct(self) -> int:
        """Samples whose class the model named."""
        return sum(row[place] for place, row in enumerate(self.confusion))

    @property
    def accuracy(self) -> float:
        """Share of the samples whose class the model named; 0 without a sample."""
        return self.correct / self.samples if self.samples else 0.0

    def recalls(self) -> Mapping[str, float]:
        """Return for each class that has samples the share of them that the model named rightly."""
        return {
            name: row[place] / sum(row)
            for place, (name, row) in enumerate(zip(self.classes, self.confusion, strict=True))
            if sum(row)
        }

    def support(self) -> Mapping[str, int]:
        """Return the samples of each class."""
        return {name: sum(row) for name, row in zip(self.classes, self.confusion, strict=True)}


def score_of(targets: Sequence[int], outputs: Sequence[int], classes: Sequence[str]) -> Score:
    """Count pairs of true and named classes, each a position in `classes`."""
    counts = [[0] * len(classes) for _ in classes]
    for target, output in zip(targets, outputs, strict=True):
        counts[target][output] += 1
    return Score(classes=tuple(classes), confusion=tuple(map(tuple, counts)))
