"""Exactly once: which samples the model has seen, from what every worker wrote down about every step.

{"g": 3, "a": 1, "from": 120, "source": "memory"}      the generation goes on at this step
{"g": 3, "a": 1, "e": 2, "s": 120, "ids": [7, 1]}      a worker is about to train these
{"g": 3, "a": 1, "c": 120}                             the step has changed the model

A step counts if any rank committed it: the collective was complete by then, so
the samples of all ranks are in. Attempt and generation (`a`, `g`) order all that
was done. A generation that goes on at step k undoes what earlier ones committed
from there on; what is left in the end is the lineage of the model, and only its
samples count.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, Final

from elastic_core.events.lines import integer

EXAMPLES: Final = 10
"""Ids or steps that are named where something is wrong."""

_LARGEST: Final = 1 << 62

Token = tuple[int, int]
"""Attempt and generation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochAudit:
    """The samples of one epoch.

    Attributes:
        samples: Samples that were trained, repeated ones included.
        is_complete: Whether the epoch came to its end; before that nothing is missed yet.
        missed: Ids that were never trained.
        repeated: Uses of an id beyond its first.
        foreign: Uses of an id that is not in the dataset.
    """

    epoch: int
    samples: int
    is_complete: bool
    missed: int = 0
    repeated: int = 0
    foreign: int = 0
    missed_examples: tuple[int, ...] = ()
    repeated_examples: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleAudit:
    """What the model has seen.

    Attributes:
        dataset: Samples of the dataset, 0 if unknown: then nothing can be missed.
        steps: Committed steps of the lineage.
        steps_lost: Committed steps that were undone: executed again, or still to be.
        undone: The same by the generation that went back.
        unrecorded: Steps before the last one that no worker's lines account for.
    """

    dataset: int
    epochs: tuple[EpochAudit, ...] = ()
    steps: int = 0
    steps_lost: int = 0
    undone: Mapping[Token, int] = field(default_factory=dict)
    unrecorded: int = 0
    unrecorded_examples: tuple[int, ...] = ()

    @property
    def missed(self) -> int:
        """Samples that were left out, over all epochs."""
        return sum(epoch.missed for epoch in self.epochs)

    @property
    def repeated(self) -> int:
        """Uses beyond the first, over all epochs."""
        return sum(epoch.repeated for epoch in self.epochs)

    @property
    def foreign(self) -> int:
        """Uses of ids that are not in the dataset, over all epochs."""
        return sum(epoch.foreign for epoch in self.epochs)

    @property
    def is_exact(self) -> bool:
        """Whether each sample was trained exactly once in each epoch that came to its end."""
        return not (self.missed or self.repeated or self.foreign or self.unrecorded)

    def sentence(self) -> str:
        """Return the finding as one sentence for people."""
        counts = f"{self.missed} missed, {self.repeated} repeated"
        if not self.is_exact:
            return f"{counts}{self._evidence()} in {_count(len(self.epochs), 'epoch')}"
        complete = [epoch for epoch in self.epochs if epoch.is_complete]
        if not complete or not self.dataset:
            trained = sum(epoch.samples for epoch in self.epochs)
            return f"no sample id was used twice in {_count(trained, 'sample')} of an unfinished epoch"
        whole = f"in each of {len(complete)} epochs" if len(complete) > 1 else "in the one epoch"
        last = self.epochs[-1]
        partly = "" if last.is_complete else f"; epoch {last.epoch + 1} stopped at {last.samples} samples"
        return f"every one of {self.dataset} sample ids was used exactly once {whole} ({counts}){partly}"

    def _evidence(self) -> str:
        """Return what is wrong: the first ids of it, and what the counts do not say."""
        said = ""
        for epoch in self.epochs:
            ids = epoch.missed_examples or epoch.repeated_examples
            if ids:
                named = ", ".join(map(str, ids[:3])) + (", …" if len(ids) > 3 else "")
                said = f" (epoch {epoch.epoch + 1}: {named})"
                break
        said += f", {self.foreign} unknown to the dataset" if self.foreign else ""
        return said + (f", {_count(self.unrecorded, 'step')} without a record" if self.unrecorded else "")


@dataclass(slots=True)
class _Work:
    """What one generation did: samples by step and worker, and the steps that it committed."""

    origin: int | None = None
    prepared: dict[int, dict[int, tuple[int, array[int]]]] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)

    def begins_at(self) -> int | None:
        """Return the step at which it went on, None if it is not known to have done anything."""
        return self.origin if self.origin is not None else min(self.committed, default=None)


def fold_audit(
    files: Iterable[Iterable[Mapping[str, Any]]], *, dataset: int, is_finished: bool
) -> SampleAudit:
    """Return what the model has seen.

    Args:
        files: The parsed lines of each worker's file; lines of unknown form are passed over.
        dataset: Samples of the dataset, 0 if unknown.
        is_finished: Whether the training came to its end, and the last epoch with it.
    """
    works = _collect(files)
    lineage, undone = _lineage(works)
    first, last = min(lineage, default=0), max(lineage, default=-1)
    recorded = [step for step in sorted(lineage) if step in works[lineage[step]].prepared]
    return SampleAudit(
        dataset=dataset,
        epochs=tuple(
            _audit_epoch(
                epoch,
                uses,
                dataset=dataset,
                is_complete=(is_finished or not is_last) and not (is_first and first > 0),
            )
            for epoch, uses, is_first, is_last in _by_epoch(works, lineage, recorded)
        ),
        steps=len(lineage),
        steps_lost=sum(undone.values()),
        undone=undone,
        unrecorded=last + 1 - first - len(recorded),
        unrecorded_examples=tuple(islice(_gaps(recorded, first, last + 1), EXAMPLES)),
    )


def _collect(files: Iterable[Iterable[Mapping[str, Any]]]) -> dict[Token, _Work]:
    works: dict[Token, _Work] = {}
    for worker, lines in enumerate(files):
        for line in lines:
            attempt, generation = integer(line, "a"), integer(line, "g")
            if attempt is not None and generation is not None:
                _note(works.setdefault((attempt, generation), _Work()), worker, line)
    return works


def _note(work: _Work, worker: int, line: Mapping[str, Any]) -> None:
    step, epoch, ids = integer(line, "s"), integer(line, "e"), line.get("ids")
    committed, origin = integer(line, "c"), integer(line, "from")
    if step is not None and epoch is not None and isinstance(ids, list):
        samples = array("q", [index for index in ids if isinstance(index, int) and abs(index) < _LARGEST])
        work.prepared.setdefault(step, {})[worker] = (epoch, samples)
    elif committed is not None:
        work.committed.add(committed)
    elif origin is not None:
        work.origin = origin if work.origin is None else min(work.origin, origin)


def _lineage(works: Mapping[Token, _Work]) -> tuple[dict[int, Token], dict[Token, int]]:
    """Return who did each step that the model is made of, and how many steps each generation undid."""
    lineage: dict[int, Token] = {}
    undone: dict[Token, int] = {}
    for token in sorted(works):
        begin = works[token].begins_at()
        if begin is None:
            continue
        gone = [step for step in lineage if step >= begin]
        for step in gone:
            del lineage[step]
        if gone:
            undone[token] = len(gone)
        lineage.update((step, token) for step in works[token].committed)
    return lineage, undone


def _by_epoch(
    works: Mapping[Token, _Work], lineage: Mapping[int, Token], steps: list[int]
) -> Iterator[tuple[int, Counter[int], bool, bool]]:
    """Yield each epoch with the uses of its ids, and whether it is the first and the last one."""

    def epoch_of(step: int) -> int:
        return next(iter(works[lineage[step]].prepared[step].values()))[0]

    ordered = sorted(steps, key=epoch_of)
    for epoch, members in groupby(ordered, key=epoch_of):
        uses: Counter[int] = Counter()
        for step in members:
            for _, ids in works[lineage[step]].prepared[step].values():
                uses.update(ids)
        yield epoch, uses, epoch == epoch_of(ordered[0]), epoch == epoch_of(ordered[-1])


def _audit_epoch(epoch: int, uses: Counter[int], *, dataset: int, is_complete: bool) -> EpochAudit:
    foreign = sum(count for index, count in uses.items() if index < 0 or (dataset and index >= dataset))
    repeated = sorted(index for index, count in uses.items() if count > 1)
    missed = [index for index in range(dataset) if index not in uses] if is_complete else []
    return EpochAudit(
        epoch=epoch,
        samples=uses.total(),
        is_complete=is_complete,
        missed=len(missed),
        repeated=sum(uses[index] - 1 for index in repeated),
        foreign=foreign,
        missed_examples=tuple(missed[:EXAMPLES]),
        repeated_examples=tuple(repeated[:EXAMPLES]),
    )


def _gaps(recorded: Iterable[int], first: int, end: int) -> Iterator[int]:
    """Yield the numbers from `first` up to `end` that are not in a sorted sequence."""
    expected = first
    for step in (*recorded, end):
        yield from range(expected, step)
        expected = step + 1


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
