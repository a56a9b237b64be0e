"""All that is known of one attempt of a run when it is over: the input of ledger and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_core.events.audit import SampleAudit
from elastic_core.events.metrics import MetricLine
from elastic_core.model.failure import Failure
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Closed
from elastic_core.model.progress import HistoryEntry, Progress, Resumption, RunResult, SlowWorker


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMarks:
    """What the flow did when, in wall-clock seconds of its machine; None: not noted, or it never came.

    Attributes:
        started_at: The attempt began.
        asked_at: The first nodes were asked for.
        granted_at: Enough nodes to train were granted.
        teardown_at: The run was over, and its nodes were to be ended.
        ended_at: Nothing of the run was left.
    """

    started_at: float
    ended_at: float
    asked_at: float | None = None
    granted_at: float | None = None
    teardown_at: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptSpan:
    """One attempt, as its own report has it.

    Attributes:
        state: How it ended, "unknown" if nobody was left to say so.
        seconds: By class; they sum up to its time.
    """

    attempt: int
    started_at: float
    ended_at: float
    state: str
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """One attempt of a run.

    Attributes:
        attempt: Counts the launches of the run.
        closed: How it ended.
        history: Its generations in their order.
        failures: In the order in which the store got them.
        slow: Workers that were slower than those of other nodes.
        lines: Of all attempts, in the order of the file.
        audit: Of all attempts; None if samples were not recorded.
        earlier: The attempts before this one.
    """

    run: str
    attempt: int
    job: JobSpec
    closed: Closed
    marks: RunMarks
    history: tuple[HistoryEntry, ...] = ()
    resumptions: tuple[Resumption, ...] = ()
    failures: tuple[Failure, ...] = ()
    slow: tuple[SlowWorker, ...] = ()
    result: RunResult | None = None
    progress: Progress | None = None
    lines: tuple[MetricLine, ...] = ()
    audit: SampleAudit | None = None
    earlier: tuple[AttemptSpan, ...] = ()

    def root_cause(self) -> Failure | None:
        """Return the first failure that no other one explains."""
        return next((failure for failure in self.failures if not failure.consequence), None)
