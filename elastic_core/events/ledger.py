"""The ledger: every second of a run's wall time, in exactly one class.

What happened is a sequence of facts in a known order: the run started, nodes were
asked for, generation 1 was published, its workers had their assignment, a state,
a first step, more steps, a change was noticed, generation 2 was published… Each
fact ends a stretch of time of one class. The order is that of the protocol, not of
the clocks: a time that lies before the fact it follows (two machines' clocks never
agree) makes an empty stretch, so whatever the times are, the stretches tile the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from typing import Final

from elastic_core.events.metrics import MetricLine
from elastic_core.events.record import RunRecord
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.progress import HistoryEntry, Resumption


class Spent(StrEnum):
    """What a second of wall time was spent on."""

    PROVISION = "provision"
    """Until the first generation: store and nodes are started, and their workers set up."""
    WAIT_FOR_CAPACITY = "wait_for_capacity"
    """Nobody trains because fewer nodes than the minimum exist, and more were asked for."""
    DETECT = "detect"
    """From the last finished step until the coordinator knew that a change was due."""
    RENDEZVOUS = "rendezvous"
    """From then on until the workers had the agreement on who trains next."""
    RESTART = "restart"
    """From the agreement until all ranks had formed their group and the same state."""
    TRAIN = "train"
    """Steps that the model did for the first time."""
    REDO = "redo"
    """Steps that had been finished before and were lost."""
    EVALUATE = "evaluate"
    """Held-out samples."""
    CHECKPOINT = "checkpoint"
    """Training stood still for a checkpoint, or the final state was saved and the model handed over."""
    TEARDOWN = "teardown"
    """The run is over: nodes and store are ended."""


COST: Final = frozenset({Spent.DETECT, Spent.WAIT_FOR_CAPACITY, Spent.RENDEZVOUS, Spent.RESTART, Spent.REDO})
"""Classes that a change of the generation costs."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Time of one class, in milliseconds since the run started.

    Attributes:
        generation: On whose account it goes: the one that was being formed or trained, one more than
            the last for what followed that, 0 if there was none.
    """

    begin_ms: int
    end_ms: int
    spent: Spent
    generation: int

    @property
    def ms(self) -> int:
        """How long it was."""
        return self.end_ms - self.begin_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A change of the generation, and what it cost.

    Attributes:
        generation: The generation that it led to; for an end of the run the last one there was.
        cause: As in `Cause`; for an end of the run its outcome.
        who: Nodes that came or went, or the worker that failed, in words.
        is_fault: Whether nobody had planned it.
        seconds: What it cost, by class; only classes of `COST`, only what is not zero.
        steps_lost: Finished steps that were undone by it.
    """

    generation: int
    cause: str
    who: str
    is_fault: bool
    seconds: dict[Spent, float] = field(default_factory=dict)
    steps_lost: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """Where the time went; the stretches tile the run without gap or overlap."""

    wall_ms: int
    stretches: tuple[Stretch, ...]
    changes: tuple[Change, ...]

    def seconds(self) -> dict[Spent, float]:
        """Return the seconds of every class; together they are the wall time."""
        sums = dict.fromkeys(Spent, 0)
        for stretch in self.stretches:
            sums[stretch.spent] += stretch.ms
        return {spent: ms / 1000 for spent, ms in sums.items()}

    def faults(self) -> tuple[Change, ...]:
        """Return the changes that nobody had planned."""
        return tuple(change for change in self.changes if change.is_fault)


def fold_ledger(record: RunRecord) -> Ledger:
    """Put every second of an attempt into its class."""
    story = _Story(record)
    stretches = _tile(story)
    return Ledger(
        wall_ms=story.wall_ms,
        stretches=stretches,
        changes=tuple(_changes(record, story, stretches)),
    )


@dataclass(frozen=True, slots=True)
class _Cut:
    """A fact that ends a stretch.

    Attributes:
        held_s: Seconds at the beginning of the stretch for which a checkpoint held training up.
    """

    at: float
    spent: Spent
    generation: int
    held_s: float = 0.0


class _Story:
    """The facts of a run by generation, in the order in which they must have happened."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        marks = record.marks
        self.wall_ms = max(0, _ms(marks.ended_at - marks.started_at))
        self.history = {entry.generation.number: entry for entry in record.history}
        self.resumptions = {resumption.generation: resumption for resumption in record.resumptions}
        self.lines: dict[int, list[MetricLine]] = {}
        self.done_before = -1
        for line in record.lines:
            if line.attempt == record.attempt:
                self.lines.setdefault(line.generation, []).append(line)
            elif line.phase == "train" and line.attempt < record.attempt:
                self.done_before = max(self.done_before, line.step)
        self.numbers = sorted({*self.history, *self.resumptions, *self.lines})

    def cuts(self) -> Iterator[_Cut]:
        """Yield all facts."""
        marks = self.record.marks
        if marks.asked_at is not None:
            yield _Cut(marks.asked_at, Spent.PROVISION, 0)
        if marks.granted_at is not None:
            yield _Cut(marks.granted_at, Spent.WAIT_FOR_CAPACITY, 0)
        done = self.done_before
        for number in self.numbers:
            yield from self._formation(number)
            lines = self.lines.get(number, ())
            yield from self._training(number, lines, done)
            done = max([done, *(line.step for line in lines if line.phase == "train")])
        yield from self._end()

    def _formation(self, number: int) -> Iterator[_Cut]:
        """Yield what lies between the last step of the generation before and the first of this one."""
        entry, resumption = self.history.get(number), self.resumptions.get(number)
        is_first = number == self.numbers[0]
        if not is_first:
            yield from self._interruption(number, entry, resumption)
        if entry is not None:
            spent = Spent.PROVISION if is_first else self._until_published(entry)
            yield _Cut(entry.published_at, spent, number)
        if resumption is not None:
            yield _Cut(resumption.assigned_at, Spent.RENDEZVOUS, number)
            yield _Cut(resumption.synced_at, Spent.RESTART, number)
            if number not in self.lines:
                yield _Cut(resumption.first_step_at, Spent.TRAIN, number)

    def _interruption(
        self, number: int, entry: HistoryEntry | None, resumption: Resumption | None
    ) -> Iterator[_Cut]:
        """Yield the end of the generation before; without its steps all of it counts as training."""
        before = self.numbers[self.numbers.index(number) - 1]
        has_steps = before in self.lines or before in self.resumptions
        if resumption is not None and resumption.last_step_at:
            yield _Cut(resumption.last_step_at, Spent.TRAIN, before)
            has_steps = True
        if entry is not None:
            known_at = entry.detected_at or entry.published_at
            yield _Cut(known_at, Spent.DETECT if has_steps else Spent.TRAIN, number if has_steps else before)
        elif resumption is not None:
            yield _Cut(resumption.noticed_at, Spent.DETECT, number)

    def _until_published(self, entry: HistoryEntry) -> Spent:
        """Return what was waited for: nodes, if those that stayed were too few."""
        if entry.generation.number - 1 not in self.history:
            return Spent.RENDEZVOUS
        stayed = len(entry.members) - len(joined(self.record.history, entry))
        return Spent.WAIT_FOR_CAPACITY if stayed < self.record.job.nodes.min else Spent.RENDEZVOUS

    def _training(self, number: int, lines: Sequence[MetricLine], done: int) -> Iterator[_Cut]:
        """Yield steps and evaluations; where the beginning is not known, the first step is part of it."""
        is_known = number in self.resumptions
        for line in lines:
            if line.phase == "evaluate":
                spent = Spent.EVALUATE
            else:
                spent = Spent.REDO if line.step <= done else Spent.TRAIN
            yield _Cut(line.wall_time, spent if is_known else Spent.RESTART, number, line.checkpoint_s)
            is_known = True

    def _end(self) -> Iterator[_Cut]:
        marks, after = self.record.marks, self.numbers[-1] + 1 if self.numbers else 0
        if marks.teardown_at is not None:
            yield _Cut(marks.teardown_at, self._last_class(), after)
        yield _Cut(marks.ended_at, Spent.TEARDOWN, after)

    def _last_class(self) -> Spent:
        """Return what the time between the last fact of the training and the teardown was spent on."""
        marks, outcome = self.record.marks, self.record.closed.outcome
        if not self.numbers:
            is_short = marks.asked_at is not None and marks.granted_at is None
            return Spent.WAIT_FOR_CAPACITY if is_short else Spent.PROVISION
        if self.numbers[-1] not in self.lines and self.numbers[-1] not in self.resumptions:
            return Spent.TRAIN  # a script tells no steps
        if outcome in (Outcome.SUCCEEDED, Outcome.PREEMPTED):
            return Spent.CHECKPOINT
        return Spent.WAIT_FOR_CAPACITY if outcome is Outcome.BELOW_MINIMUM else Spent.DETECT


def _tile(story: _Story) -> tuple[Stretch, ...]:
    begin, stretches = 0, []
    for cut in story.cuts():
        end = min(max(begin, _ms(cut.at - story.record.marks.started_at)), story.wall_ms)
        held = min(begin + max(0, _ms(cut.held_s)), end)
        stretches.append(Stretch(begin, held, Spent.CHECKPOINT, cut.generation))
        stretches.append(Stretch(held, end, cut.spent, cut.generation))
        begin = end
    return tuple(stretch for stretch in stretches if stretch.ms)


def _changes(record: RunRecord, story: _Story, stretches: Sequence[Stretch]) -> Iterator[Change]:
    costs: dict[int, dict[Spent, int]] = {}
    for stretch in stretches:
        if stretch.spent in COST:
            cost = costs.setdefault(stretch.generation, {})
            cost[stretch.spent] = cost.get(stretch.spent, 0) + stretch.ms
    for entry in record.history[1:]:
        number = entry.generation.number
        yield Change(
            generation=number,
            cause=entry.generation.cause,
            who=_who(record, entry),
            is_fault=entry.generation.cause in (Cause.LOSS, Cause.FAILURE),
            seconds=_seconds(costs.get(number, {})),
            steps_lost=_steps_lost(record, story, number),
        )
    if record.closed.outcome not in (Outcome.SUCCEEDED, Outcome.PREEMPTED):
        last = story.numbers[-1] if story.numbers else 0
        yield Change(
            generation=last,
            cause=record.closed.outcome,
            who=_failed_worker(record, last) or record.closed.reason,
            is_fault=True,
            seconds=_seconds(costs.get(last + 1, {})),
        )


def _who(record: RunRecord, entry: HistoryEntry) -> str:
    """Say which nodes came or went, or which worker failed."""
    generation = entry.generation
    if generation.cause is Cause.FAILURE:
        return _failed_worker(record, generation.number - 1) or generation.reason
    gone = [f"{instance_of(node)} ({how})" for node, how in entry.lost.items()]
    return ", ".join([*gone, *(f"{instance_of(node)} (joined)" for node in joined(record.history, entry))])


def _failed_worker(record: RunRecord, generation: int) -> str:
    """Return the headline of a generation's first failure that no other one explains, "" for none."""
    for failure in record.failures:
        if failure.generation == generation and not failure.consequence:
            return failure.headline()
    return ""


def joined(history: Sequence[HistoryEntry], entry: HistoryEntry) -> list[NodeId]:
    """Return the members of a generation that were not in the one before; all of them in the first."""
    number = entry.generation.number
    before = next((old for old in history if old.generation.number == number - 1), None)
    old = {member.node_id for member in before.members} if before else set()
    return [member.node_id for member in entry.members if member.node_id not in old]


def _steps_lost(record: RunRecord, story: _Story, number: int) -> int:
    """Return the steps that a generation undid: by the audit, else by what rank 0 told."""
    if record.audit is not None:
        return record.audit.undone.get((record.attempt, number), 0)
    resumption = story.resumptions.get(number)
    if resumption is None:
        return 0
    earlier = (line for n in story.numbers if n < number for line in story.lines.get(n, ()))
    highest = max([resumption.step_before, *(line.step for line in earlier if line.phase == "train")])
    return max(0, highest + 1 - resumption.step_resumed)


def _seconds(cost: dict[Spent, int]) -> dict[Spent, float]:
    return {spent: cost[spent] / 1000 for spent in Spent if spent in cost}


def _ms(seconds: float) -> int:
    """Return whole milliseconds; a time that is none counts as long past."""
    return round(seconds * 1000) if isfinite(seconds * 1000) else 0
