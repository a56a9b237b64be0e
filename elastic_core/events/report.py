"""`report.json`: how an attempt of a run went, for people and programs.

The model below is its documented schema (docs/report.md, docs/report.schema.json).
Times are wall-clock seconds since the epoch, durations are seconds; a field that
does not apply is null, never left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field

from elastic_core.events.attempts import fold_attempts
from elastic_core.events.audit import SampleAudit
from elastic_core.events.costs import MachineCost, total_usd
from elastic_core.events.ledger import Change, Ledger, Spent, fold_ledger
from elastic_core.events.metrics import surviving
from elastic_core.events.record import AttemptSpan, RunRecord
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.progress import HistoryEntry

MAX_FAILURES: Final = 100
"""Consequences that a report repeats: thousands of nodes may report one end."""


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class MemberRow(_Part):
    """A node within a generation."""

    node_id: str = Field(description="Instance name and incarnation: `name.incarnation`.")
    group_rank: int = Field(description="The node's number, 0..nodes-1.")
    first_rank: int = Field(description="Rank of its first worker.")
    slots: int = Field(description="Its workers.")
    address: str = Field(description="Where the other nodes reached it.")


class GenerationRow(_Part):
    """One agreement on who trains."""

    number: int = Field(description="Grows by one; starts at 1 in each attempt.")
    cause: Cause = Field(description="start, join, loss, drain, rescale or failure.")
    reason: str = Field(description="One sentence: what was decided and why.")
    members: tuple[MemberRow, ...] = Field(description="In the order of their ranks.")
    world_size: int = Field(description="Workers.")
    published_at: float = Field(description="When it came into force.")
    lost: dict[str, str] = Field(description="Nodes that are not in it any more, with how they went.")
    step: int | None = Field(description="First step that it trained; null if it told none.")
    source: str | None = Field(description="Where its state came from: fresh, memory or checkpoint.")
    cost_s: float = Field(description="Seconds without new steps that it cost; 0 for the first.")
    steps_lost: int = Field(description="Finished steps that it undid.")


class FailureRow(_Part):
    """Why a worker failed."""

    headline: str = Field(description="The one line to read first.")
    node_id: str
    generation: int
    rank: int
    local_rank: int
    exit_code: int = Field(description="As a shell shows it: the script's own, or 128 + signal.")
    message: str
    location: str = Field(description="`file.py:12` of the innermost frame of the user's code, or empty.")
    traceback: str
    step: int = Field(description="Last finished step, -1 if none was told.")
    started: bool = Field(description="Whether a process group had been formed.")
    consequence: bool = Field(description="Whether the end of a peer, or our own stop, explains it.")
    log_tail: str = Field(description="The last lines that the worker wrote.")
    wall_time: float


class FaultRow(_Part):
    """A change that nobody had planned, and what it cost."""

    generation: int = Field(description="The generation that it led to, or the last one if it ended the run.")
    cause: str = Field(description="loss or failure; for the end of the run its outcome.")
    who: str = Field(description="The nodes that were lost, or the worker that failed.")
    seconds: dict[Spent, float] = Field(description="Seconds without new steps, by class of the ledger.")
    steps_lost: int = Field(description="Finished steps that had to be done again.")


class SlowRow(_Part):
    """A worker that held up the others, by its own work without the time in collectives."""

    headline: str = Field(description="The one line to read first.")
    node_id: str
    rank: int
    local_rank: int
    generation: int
    step: int = Field(description="At which it was found, or found to have recovered.")
    is_slow: bool = Field(description="Whether it was so to the end.")
    ratio: float = Field(description="Times as long as the others.")
    seconds: float = Field(description="Of its own work a step.")
    others: float = Field(description="The same of the middle one of the other nodes' workers.")
    looks: int = Field(description="Steps that it was judged by; very short ones are put together.")
    wall_time: float


class EpochRow(_Part):
    """The samples of one epoch that the model has seen."""

    epoch: int = Field(description="From 0.")
    samples: int = Field(description="Trained samples, repeated ones included.")
    is_complete: bool = Field(description="Whether the epoch came to its end.")
    missed: int
    repeated: int
    missed_examples: tuple[int, ...] = Field(description="Ids, the first few.")
    repeated_examples: tuple[int, ...] = Field(description="Ids, the first few.")


class AttemptRow(_Part):
    """One attempt of a run."""

    attempt: int
    state: str = Field(description="How it ended; unknown if nobody was left to say so.")
    started_at: float
    wall_s: float


class WholeRun(_Part):
    """All attempts of a run together."""

    attempts: tuple[AttemptRow, ...]
    wall_s: float = Field(description="From the first start to the end of this attempt.")
    ledger: dict[str, float] = Field(
        description="Seconds by class over all attempts; stopped is the time between two."
    )
    goodput: float = Field(description="As in an attempt, of the time that is not stopped.")
    steps_executed: int | None = Field(
        description="Finished steps, also those that were undone later; null if not recorded."
    )


class CostRow(_Part):
    """A machine and what it cost."""

    model_config = ConfigDict(title="Cost")

    machine: str
    kind: str = Field(description="Its type.")
    market: str = Field(description="spot or on-demand.")
    usd_per_hour: float = Field(description="The price when it was launched.")
    hours: float
    usd: float


class RunReport(_Part):
    """How an attempt of a run went."""

    model_config = ConfigDict(title="Run report")

    version: int = Field(1, description="Of this format; grows when a field changes its meaning.")
    run: str = Field(description="The run's id.")
    job: str = Field(description="The job's name.")
    attempt: int = Field(description="Counts the launches of the run; resuming it is a new one.")
    state: Outcome = Field(description="succeeded, failed, preempted, below-minimum or no-progress.")
    exit_code: int = Field(description="What flow and agents exited with.")
    reason: str = Field(description="One sentence on how it ended.")
    started_at: float
    wall_s: float = Field(description="From the start of the attempt until nothing of it was left.")
    test_accuracy: float | None = Field(description="Of the last evaluation; null if there was none.")
    epochs: int = Field(description="Finished epochs of the whole training, earlier attempts included.")
    steps: int = Field(description="Finished optimizer steps, likewise.")
    samples: int = Field(description="Trained samples, likewise.")
    generations: tuple[GenerationRow, ...]
    restart_count: int = Field(description="Worker failures that were mended; node losses are none.")
    steps_lost: int = Field(description="Finished steps that were undone, over all attempts.")
    samples_missed: int | None = Field(description="Over all finished epochs; null if not recorded.")
    samples_repeated: int | None = Field(description="Uses beyond the first; null if not recorded.")
    exactly_once: str = Field(description="The finding of the sample audit as a sentence, or empty.")
    sample_epochs: tuple[EpochRow, ...] = Field(description="The sample audit by epoch.")
    first_failure: FailureRow | None = Field(description="The root cause: the first that no other explains.")
    consequences: tuple[FailureRow, ...] = Field(description="Failures that another end explains.")
    ledger: dict[Spent, float] = Field(description="Seconds by class; they sum up to `wall_s`.")
    goodput: float = Field(description="Share of the wall time in which the model learned something new.")
    faults: tuple[FaultRow, ...]
    slow_workers: tuple[SlowRow, ...] = Field(
        (), description="Workers that were found to be slower than those of other nodes."
    )
    whole: WholeRun | None = Field(None, description="All attempts of the run together.")
    model: str = Field(description="Path of the trained model, empty if there is none.")
    checkpoint_failures: int = Field(0, description="Durable checkpoints that could not be written.")
    checkpoints_skipped: int = Field(
        0, description="Checkpoints that were due while the one before was still being written."
    )
    checkpoint_trouble: str = Field(
        "", description="Why the last checkpoint was not written; empty if it was."
    )
    pictures: tuple[str, ...] = Field(description="Paths, relative to the run's directory.")
    logs: dict[str, tuple[str, ...]] = Field(description="Log files by node, relative likewise.")
    resumable_with: str = Field(description="Command that goes on where it stopped; empty if complete.")
    versions: dict[str, str] = Field(description="Of what took part, by package.")
    cost_usd: float | None = Field(
        None, description="Of the nodes over all attempts; null where none is known."
    )
    costs: tuple[CostRow, ...] = Field((), description="What each node cost.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Enclosures:
    """What a report points to, and who wrote it.

    Attributes:
        logs: Files by node.
        costs: Machines that were billed.
    """

    pictures: Sequence[str] = ()
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict)
    resumable_with: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    costs: Sequence[MachineCost] = ()


def _costs(machines: Sequence[MachineCost], now: float) -> dict[str, Any]:
    if not machines:
        return {}
    rows = tuple(
        CostRow(
            machine=machine.machine,
            kind=machine.kind,
            market=machine.market,
            usd_per_hour=machine.usd_per_hour,
            hours=round(machine.hours(now), 4),
            usd=round(machine.usd(now), 4),
        )
        for machine in machines
    )
    return {"costs": rows, "cost_usd": round(total_usd(machines, now), 4)}


def build_report(record: RunRecord, enclosures: Enclosures | None = None) -> RunReport:
    """Return the report of an attempt."""
    enclosed = enclosures or Enclosures()
    ledger = fold_ledger(record)
    seconds, wall_s = ledger.seconds(), ledger.wall_ms / 1000
    root = record.root_cause()
    closed, audit = record.closed, record.audit
    return RunReport(
        run=record.run,
        job=record.job.name,
        attempt=record.attempt,
        state=closed.outcome,
        exit_code=closed.exit_code,
        reason=closed.reason,
        started_at=record.marks.started_at,
        wall_s=wall_s,
        test_accuracy=_test_accuracy(record),
        **_reached(record),
        generations=tuple(_generation(entry, record, ledger) for entry in record.history),
        restart_count=record.history[-1].generation.restart_count if record.history else 0,
        steps_lost=audit.steps_lost if audit else sum(change.steps_lost for change in ledger.changes),
        samples_missed=audit.missed if audit else None,
        samples_repeated=audit.repeated if audit else None,
        exactly_once=audit.sentence() if audit else "",
        sample_epochs=_epochs(audit),
        first_failure=_failure(root) if root else None,
        consequences=tuple(_failure(f) for f in record.failures if f.consequence)[:MAX_FAILURES],
        ledger=seconds,
        goodput=round(seconds[Spent.TRAIN] / wall_s, 4) if wall_s else 0.0,
        faults=tuple(_fault(change) for change in ledger.faults()),
        slow_workers=tuple(SlowRow(headline=slow.headline(), **asdict(slow)) for slow in record.slow),
        whole=_whole(record, seconds),
        model=record.result.model if record.result else "",
        **_checkpoint_trouble(record),
        pictures=tuple(enclosed.pictures),
        logs={node: tuple(files) for node, files in enclosed.logs.items()},
        resumable_with="" if closed.outcome is Outcome.SUCCEEDED else enclosed.resumable_with,
        versions=dict(enclosed.versions),
        **_costs(enclosed.costs, record.marks.ended_at),
    )


def _whole(record: RunRecord, seconds: Mapping[Spent, float]) -> WholeRun:
    marks, audit = record.marks, record.audit
    now = AttemptSpan(
        attempt=record.attempt,
        started_at=marks.started_at,
        ended_at=marks.ended_at,
        state=record.closed.outcome,
        seconds={str(spent): took for spent, took in seconds.items()},
    )
    whole = fold_attempts([*record.earlier, now])
    return WholeRun(
        attempts=tuple(
            AttemptRow(
                attempt=span.attempt,
                state=span.state,
                started_at=span.started_at,
                wall_s=round(sum(span.seconds.values()), 3),
            )
            for span in whole.spans
        ),
        wall_s=round(whole.wall_s, 3),
        ledger={spent: round(took, 3) for spent, took in whole.seconds.items()},
        goodput=round(whole.goodput, 4),
        steps_executed=audit.steps + audit.steps_lost if audit else None,
    )


def _checkpoint_trouble(record: RunRecord) -> dict[str, Any]:
    """Return how often checkpoints failed in this attempt, and why the last one did."""
    progress = record.progress
    if progress is None:
        return {}
    names = ("checkpoint_failures", "checkpoints_skipped")
    counts = {name: int(progress.metrics.get(name, 0)) for name in names}
    return {**counts, "checkpoint_trouble": progress.trouble}


def _test_accuracy(record: RunRecord) -> float | None:
    figures = [dict(line.figures) for line in record.lines if line.phase == "evaluate"]
    if record.result is not None:
        figures.append(dict(record.result.metrics))
    found = [each["test_accuracy"] for each in figures if "test_accuracy" in each]
    return found[-1] if found else None


def _reached(record: RunRecord) -> dict[str, int]:
    """Return epochs, steps and samples: from the result, else from the newest that was told."""
    if record.result is not None:
        result = record.result
        return {"epochs": result.epochs, "steps": result.steps, "samples": result.samples}
    told = (0, 0, 0)
    trained = [line for line in surviving(record.lines) if line.phase == "train"]
    if trained:
        told = (trained[-1].step + 1, trained[-1].epoch, trained[-1].samples)
    if record.progress is not None:
        told = max(told, (record.progress.step, record.progress.epoch, record.progress.samples))
    return {"epochs": told[1], "steps": told[0], "samples": told[2]}


def _generation(entry: HistoryEntry, record: RunRecord, ledger: Ledger) -> GenerationRow:
    generation = entry.generation
    number = generation.number
    changes = {(change.generation, change.cause): change for change in ledger.changes}
    change = changes.get((number, generation.cause))
    resumed = next((each for each in record.resumptions if each.generation == number), None)
    return GenerationRow(
        number=number,
        cause=generation.cause,
        reason=generation.reason,
        members=tuple(
            MemberRow(
                node_id=member.node_id,
                group_rank=member.group_rank,
                first_rank=member.first_rank,
                slots=member.slots,
                address=member.address,
            )
            for member in entry.members
        ),
        world_size=generation.world_size,
        published_at=entry.published_at,
        lost={str(node): how for node, how in entry.lost.items()},
        step=resumed.step_resumed if resumed else None,
        source=resumed.source if resumed else None,
        cost_s=round(sum(change.seconds.values()), 3) if change else 0.0,
        steps_lost=change.steps_lost if change else 0,
    )


def _epochs(audit: SampleAudit | None) -> tuple[EpochRow, ...]:
    if audit is None:
        return ()
    return tuple(
        EpochRow(
            epoch=epoch.epoch,
            samples=epoch.samples,
            is_complete=epoch.is_complete,
            missed=epoch.missed,
            repeated=epoch.repeated,
            missed_examples=epoch.missed_examples,
            repeated_examples=epoch.repeated_examples,
        )
        for epoch in audit.epochs
    )


def _failure(failure: Failure) -> FailureRow:
    return FailureRow(headline=failure.headline(), **asdict(failure))


def _fault(change: Change) -> FaultRow:
    return FaultRow(
        generation=change.generation,
        cause=change.cause,
        who=change.who,
        seconds=change.seconds,
        steps_lost=change.steps_lost,
    )
