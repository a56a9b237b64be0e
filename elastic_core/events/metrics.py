"""`metrics.jsonl`: one line a step and one an evaluation, from rank 0 of each generation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final, Literal

from elastic_core.events.lines import integer
from elastic_core.model.progress import RunResult

_LARGEST: Final = 1e300
"""No figure is so large; what JSON calls NaN or Infinity is none at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricLine:
    """Something that training finished.

    Attributes:
        step: Index of the step, or finished steps at an evaluation.
        samples: Finished training samples of the whole job; 0 at an evaluation.
        world_size: Workers that did it; 0 at an evaluation.
        wall_time: When it was finished.
        checkpoint_s: Seconds since the line before for which a checkpoint held training up.
        figures: loss, lr, accuracy… of the step, or what the evaluation found.
    """

    phase: Literal["train", "evaluate"]
    attempt: int
    generation: int
    step: int
    epoch: int
    wall_time: float
    samples: int = 0
    world_size: int = 0
    checkpoint_s: float = 0.0
    figures: Mapping[str, float] = field(default_factory=dict)


def parse_metrics(lines: Iterable[Mapping[str, Any]]) -> Iterator[MetricLine]:
    """Yield the lines in their order; those of another form are passed over."""
    for line in lines:
        evaluation = line.get("evaluation")
        figures = line.get("metrics") if evaluation is None else evaluation
        step, generation = integer(line, "step"), integer(line, "generation")
        wall_time = _number(line.get("wall_time"))
        if not isinstance(figures, dict) or step is None or generation is None or wall_time is None:
            continue
        yield MetricLine(
            phase="train" if evaluation is None else "evaluate",
            attempt=integer(line, "attempt") or 0,
            generation=generation,
            step=step,
            epoch=integer(line, "epoch") or 0,
            wall_time=wall_time,
            samples=integer(line, "samples") or 0,
            world_size=integer(line, "world_size") or 0,
            checkpoint_s=max(_number(line.get("checkpoint_s")) or 0.0, 0.0),
            figures={name: value for name, raw in figures.items() if (value := _number(raw)) is not None},
        )


def surviving(lines: Iterable[MetricLine]) -> list[MetricLine]:
    """Return the lines of the steps that the model is made of, in the order of their steps.

    A generation that goes on at step k undoes what earlier ones told from there on.
    """
    kept: list[MetricLine] = []
    ordered = sorted(lines, key=lambda line: (line.attempt, line.generation))
    token = None
    for line in ordered:
        if token != (line.attempt, line.generation):
            token = (line.attempt, line.generation)
            kept = [old for old in kept if _finished(old) <= line.step]
        kept.append(line)
    return kept


def dataset_size(lines: Iterable[MetricLine], result: RunResult | None) -> int:
    """Return the samples of an epoch, 0 if no epoch has come to its end.

    Nothing is dropped and nothing padded, so the samples up to the end of an epoch are a multiple.
    """
    if result is not None and result.epochs and result.samples % result.epochs == 0:
        return result.samples // result.epochs
    train = [line for line in surviving(lines) if line.phase == "train"]
    for last, first in pairwise(train):
        if first.epoch == last.epoch + 1 and last.samples % first.epoch == 0:
            return last.samples // first.epoch
    return 0


def _finished(line: MetricLine) -> int:
    """Return the steps that were finished when the line was written."""
    return line.step + (line.phase == "train")


def _number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and -_LARGEST < value < _LARGEST else None
