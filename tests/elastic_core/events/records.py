"""Parts of a run's record, made short for tests. Times are seconds since the run started at `ZERO`."""

from typing import Any

from elastic_core.events.metrics import MetricLine
from elastic_core.events.record import RunMarks, RunRecord
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Cause, Closed, Generation, Member, Outcome
from elastic_core.model.progress import HistoryEntry, Resumption

ZERO = 1_800_000_000.0

SUCCEEDED = Closed(outcome=Outcome.SUCCEEDED, exit_code=0, reason="2 nodes finished generation 1")
FAILED = Closed(outcome=Outcome.FAILED, exit_code=7, reason="rank 1 raised")
PREEMPTED = Closed(outcome=Outcome.PREEMPTED, exit_code=75, reason="stopped by Ctrl-C")


def marks(**times: float) -> RunMarks:
    return RunMarks(**{"started_at": ZERO, **{f"{name}_at": ZERO + at for name, at in times.items()}})


def member(name: str, rank: int) -> Member:
    return Member(node_id=NodeId(f"{name}.1"), address="127.0.0.1", slots=1, group_rank=rank, first_rank=rank)


def generation(
    number: int,
    members: str,
    cause: Cause = Cause.START,
    *,
    detected: float = 0,
    published: float,
    **more: Any,
) -> HistoryEntry:
    """A generation of nodes named by single letters; `lost` maps letters to how they went."""
    lost = {NodeId(f"{name}.1"): how for name, how in more.pop("lost", {}).items()}
    return HistoryEntry(
        generation=Generation(
            number=number,
            cause=cause,
            restart_count=more.pop("restarts", 0),
            world_size=len(members),
            group_world_size=len(members),
            master_address="127.0.0.1",
            master_port=20_000,
            reason=more.pop("reason", str(cause)),
        ),
        members=tuple(member(name, rank) for rank, name in enumerate(members)),
        lost=lost,
        detected_at=ZERO + detected,
        published_at=ZERO + published,
        **more,
    )


def resumption(number: int, *, assigned: float, synced: float, first_step: float, **more: Any) -> Resumption:
    last = more.pop("last_step", None)
    return Resumption(
        generation=number,
        last_step_at=0.0 if last is None else ZERO + last,
        noticed_at=0.0,
        assigned_at=ZERO + assigned,
        formed_at=ZERO + assigned,
        synced_at=ZERO + synced,
        first_step_at=ZERO + first_step,
        step_before=more.pop("before", -1),
        step_resumed=more.pop("resumed", 0),
        source=more.pop("source", "memory"),
    )


def step(number: int, at: float, *, g: int = 1, a: int = 1, **more: Any) -> MetricLine:
    return MetricLine(
        phase="train", attempt=a, generation=g, step=number, epoch=more.pop("epoch", 0),
        wall_time=ZERO + at, **more,
    )  # fmt: skip


def evaluation(number: int, at: float, *, g: int = 1, a: int = 1, **figures: float) -> MetricLine:
    return MetricLine(
        phase="evaluate", attempt=a, generation=g, step=number, epoch=1, wall_time=ZERO + at, figures=figures
    )


def failure(name: str, g: int, **more: Any) -> Failure:
    given = {"rank": 0, "local_rank": 0, "exit_code": 1, "message": "ValueError: bad label 7", **more}
    return Failure(node_id=NodeId(f"{name}.1"), generation=g, **given)


def record(**parts: Any) -> RunRecord:
    given = {
        "run": "digits-1",
        "attempt": 1,
        "job": JobSpec(),
        "closed": SUCCEEDED,
        "marks": marks(ended=100),
    }
    return RunRecord(**(given | parts))
