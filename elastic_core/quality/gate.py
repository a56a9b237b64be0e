"""The gate: whether a challenger takes the champion's place, by rules that were written down before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict, Field

from elastic_core.quality.score import Score


class Gate(BaseModel):
    """Rules that a challenger must keep, all of them."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Gate")

    min_accuracy: float = Field(
        0.0, ge=0, le=1, description="Accuracy that a champion needs at least, from 0 to 1."
    )
    min_gain: float = Field(
        0.0,
        ge=-1,
        le=1,
        description="Accuracy that it must have beyond the champion's; 0: as good is enough.",
    )
    max_class_regression: float = Field(
        0.05, ge=0, le=1, description="How much of its recall a class may lose at most."
    )
    min_class_samples: int = Field(
        10, ge=1, description="Classes with fewer held-out samples are not judged one by one."
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate decided.

    Attributes:
        reasons: A sentence for each rule that was broken, or one that says why it is let through.
    """

    is_promoted: bool
    reasons: tuple[str, ...]


def judge(gate: Gate, challenger: Score, champion: Score | None) -> Verdict:
    """Return whether a challenger may take the champion's place; both were scored on the same samples."""
    broken = tuple(_broken(gate, challenger, champion))
    if broken:
        return Verdict(False, broken)
    reached = f"accuracy {challenger.accuracy:.2%}"
    if champion is None:
        return Verdict(True, (f"the first champion: {reached}",))
    gain = challenger.accuracy - champion.accuracy
    return Verdict(True, (f"{reached}, {100 * gain:+.2f} points on the champion's {champion.accuracy:.2%}",))


def _broken(gate: Gate, challenger: Score, champion: Score | None) -> Iterator[str]:
    accuracy = challenger.accuracy
    if accuracy < gate.min_accuracy:
        yield f"accuracy {accuracy:.2%} is below min_accuracy {gate.min_accuracy:.2%}"
    if champion is None:
        return
    # Counts are compared, for a difference of two quotients is not exact.
    needed = champion.correct + gate.min_gain * challenger.samples
    if challenger.correct < needed - 1e-9:
        yield (
            f"accuracy {accuracy:.2%} is {100 * (accuracy - champion.accuracy):+.2f} points from the "
            f"champion's {champion.accuracy:.2%}: min_gain asks for {100 * gate.min_gain:+.2f}"
        )
    yield from _worse_classes(gate, challenger, champion)


def _worse_classes(gate: Gate, challenger: Score, champion: Score) -> Iterator[str]:
    before, support = champion.recalls(), challenger.support()
    for name, recall in challenger.recalls().items():
        if support[name] < gate.min_class_samples or name not in before:
            continue
        lost = before[name] - recall
        if lost > gate.max_class_regression + 1e-9:
            yield (
                f"class {name!r} fell from {before[name]:.2%} to {recall:.2%}: max_class_regression "
                f"allows {100 * gate.max_class_regression:.2f} points"
            )
