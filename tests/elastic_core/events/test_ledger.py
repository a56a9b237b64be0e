import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_core.events.audit import SampleAudit
from elastic_core.events.ledger import Change, Ledger, Spent, fold_ledger
from elastic_core.events.metrics import MetricLine
from elastic_core.events.record import RunMarks
from elastic_core.model.job import JobSpec, NodeBounds
from elastic_core.model.membership import Cause, Closed, Outcome
from elastic_core.model.progress import HistoryEntry, Resumption
from tests.elastic_core.events.records import (
    FAILED,
    PREEMPTED,
    ZERO,
    evaluation,
    failure,
    generation,
    marks,
    member,
    record,
    resumption,
    step,
)


def spent(ledger: Ledger) -> dict[str, float]:
    return {str(kind): seconds for kind, seconds in ledger.seconds().items() if seconds}


def test_an_undisturbed_run_is_provisioned_trained_evaluated_and_torn_down() -> None:
    ledger = fold_ledger(
        record(
            marks=marks(asked=1, granted=1.5, teardown=20, ended=21),
            history=(generation(1, "ab", published=5),),
            resumptions=(resumption(1, assigned=5.1, synced=5.3, first_step=6),),
            lines=(step(0, 6), step(1, 7, checkpoint_s=0.25), evaluation(2, 19), step(2, 19.5)),
        )
    )
    assert spent(ledger) == {
        "provision": 1 + 3.5,
        "wait_for_capacity": 0.5,
        "rendezvous": 0.1,
        "restart": 0.2,
        "train": 0.7 + 0.75 + 0.5,
        "checkpoint": 0.25 + 0.5,
        "evaluate": 12.0,
        "teardown": 1.0,
    }
    assert ledger.changes == ()


def lossy(**more: Any) -> Ledger:
    """Node b is lost after step 2 at 12 s; step 2 is done again at 13 s."""
    return fold_ledger(
        record(
            marks=marks(teardown=20, ended=20),
            history=(
                generation(1, "ab", published=5),
                generation(2, "a", Cause.LOSS, detected=12.3, published=12.4, lost={"b": "lease ended"}),
            ),
            resumptions=(
                resumption(1, assigned=5, synced=5, first_step=10),
                resumption(2, last_step=12, assigned=12.5, synced=12.7, first_step=13, before=2, resumed=2),
            ),
            lines=(step(0, 10), step(1, 11), step(2, 12), step(2, 13, g=2), step(3, 20, g=2)),
            **more,
        )
    )


def test_a_lost_node_costs_detection_rendezvous_restart_and_the_steps_done_again() -> None:
    assert spent(lossy()) == {
        "provision": 5.0,
        "train": 7.0 + 7.0,
        "detect": 0.3,
        "rendezvous": 0.2,
        "restart": 0.2,
        "redo": 0.3,
    }


def test_a_fault_tells_who_was_lost_and_what_it_cost() -> None:
    assert lossy().faults() == (
        Change(
            generation=2,
            cause="loss",
            who="b (lease ended)",
            is_fault=True,
            seconds={Spent.DETECT: 0.3, Spent.RENDEZVOUS: 0.2, Spent.RESTART: 0.2, Spent.REDO: 0.3},
            steps_lost=1,
        ),
    )


def test_the_audit_knows_better_than_rank_0_how_many_steps_were_lost() -> None:
    audit = SampleAudit(dataset=0, undone={(1, 2): 4, (0, 2): 9})
    assert lossy(audit=audit).faults()[0].steps_lost == 4


def test_survivors_that_train_on_until_a_joiner_is_in_lose_no_time_to_its_coming() -> None:
    ledger = fold_ledger(
        record(
            marks=marks(ended=20),
            history=(
                generation(1, "a", published=0),
                generation(2, "ab", Cause.JOIN, detected=9, published=9.1),
            ),
            resumptions=(
                resumption(1, assigned=0, synced=0, first_step=5),
                resumption(2, last_step=10, assigned=9.2, synced=10.1, first_step=11, before=1, resumed=2),
            ),
            lines=(step(0, 5), step(1, 10), step(2, 11, g=2), step(3, 20, g=2)),
        )
    )
    assert spent(ledger) == {"train": 19.9, "restart": 0.1}
    assert ledger.faults() == ()
    assert ledger.changes[0].who == "b (joined)"
    assert ledger.changes[0].seconds == {Spent.RESTART: 0.1}


def test_waiting_for_a_replacement_below_the_minimum_is_no_rendezvous() -> None:
    ledger = fold_ledger(
        record(
            job=JobSpec(nodes=NodeBounds(min=2, target=2, max=2)),
            marks=marks(ended=40),
            history=(
                generation(1, "ab", published=0),
                generation(2, "ac", Cause.LOSS, detected=10.5, published=30, lost={"b": "lease ended"}),
            ),
            resumptions=(resumption(2, last_step=10, assigned=30, synced=30, first_step=31, resumed=1),),
            lines=(step(0, 10), step(1, 40, g=2)),
        )
    )
    assert spent(ledger) == {"restart": 10.0, "detect": 0.5, "wait_for_capacity": 19.5, "train": 10.0}
    assert ledger.changes[0].who == "b (lease ended), c (joined)"


def test_a_script_that_tells_no_steps_trains_between_its_generations() -> None:
    ledger = fold_ledger(
        record(
            marks=marks(teardown=30, ended=31),
            history=(
                generation(1, "ab", published=4),
                generation(2, "a", Cause.LOSS, detected=20, published=20.5),
            ),
        )
    )
    assert spent(ledger) == {"provision": 4.0, "train": 16.0 + 9.5, "rendezvous": 0.5, "teardown": 1.0}


def test_steps_of_an_earlier_attempt_are_done_again_not_trained() -> None:
    ledger = fold_ledger(
        record(
            attempt=2,
            marks=marks(ended=10),
            history=(generation(1, "a", published=0),),
            resumptions=(resumption(1, assigned=0, synced=0, first_step=1, resumed=5),),
            lines=(step(5, -9), step(6, -8), step(5, 1, a=2), step(6, 3, a=2), step(7, 10, a=2)),
        )
    )
    assert spent(ledger) == {"redo": 3.0, "train": 7.0}


def test_a_run_that_never_got_its_nodes_waited_for_capacity() -> None:
    closed = Closed(outcome=Outcome.BELOW_MINIMUM, exit_code=69, reason="0 of 2 nodes came")
    ledger = fold_ledger(record(closed=closed, marks=marks(asked=2, teardown=62, ended=63)))
    assert spent(ledger) == {"provision": 2.0, "wait_for_capacity": 60.0, "teardown": 1.0}
    assert ledger.faults()[0].who == "0 of 2 nodes came"


def test_the_failure_that_ended_the_run_is_a_fault_of_its_last_generation() -> None:
    ledger = fold_ledger(
        record(
            closed=FAILED,
            marks=marks(teardown=12, ended=13),
            history=(generation(1, "ab", published=0),),
            resumptions=(resumption(1, assigned=0, synced=0, first_step=10),),
            lines=(step(0, 10),),
            failures=(failure("a", 1, consequence=True), failure("b", 1, rank=1, location="t.py:3", step=0)),
        )
    )
    assert ledger.faults() == (
        Change(
            generation=1,
            cause="failed",
            who="rank 1 on node b.1: ValueError: bad label 7 at t.py:3 after step 0",
            is_fault=True,
            seconds={Spent.DETECT: 2.0},
        ),
    )


def test_a_mended_failure_names_its_worker() -> None:
    ledger = fold_ledger(
        record(
            history=(
                generation(1, "ab", published=0),
                generation(2, "ab", Cause.FAILURE, published=50, reason="a worker failed"),
                generation(3, "ab", Cause.FAILURE, published=60, reason="rank 0 died"),
            ),
            failures=(failure("b", 1, rank=1, message="died by signal 9 (SIGKILL)", step=4),),
        )
    )
    assert [fault.who for fault in ledger.faults()] == [
        "rank 1 on node b.1: died by signal 9 (SIGKILL) after step 4",
        "rank 0 died",
    ]


def test_a_stopped_run_ends_with_its_checkpoint() -> None:
    ledger = fold_ledger(
        record(closed=PREEMPTED, marks=marks(teardown=8, ended=9), lines=(step(0, 3), step(1, 6)))
    )
    assert spent(ledger) == {"restart": 3.0, "train": 3.0, "checkpoint": 2.0, "teardown": 1.0}


@pytest.mark.parametrize("skew", [-2.0, -0.05, 0.05, 2.0])
def test_a_clock_that_is_off_moves_time_between_classes_but_loses_none(skew: float) -> None:
    ledger = fold_ledger(
        record(
            marks=marks(ended=20),
            history=(
                generation(1, "ab", published=5),
                generation(2, "b", Cause.LOSS, detected=12.3, published=12.4),
            ),
            resumptions=(
                resumption(
                    2, last_step=12 + skew, assigned=12.5 + skew, synced=13 + skew, first_step=14 + skew
                ),
            ),
            lines=(step(0, 10), step(1, 12), step(2, 14 + skew, g=2)),
        )
    )
    assert sum(stretch.ms for stretch in ledger.stretches) == 20_000


# ---- whatever the facts are -------------------------------------------------------------------

times = st.floats(ZERO - 50, ZERO + 150) | st.sampled_from([0.0, math.nan, math.inf, -math.inf, 1e308])
numbers = st.integers(1, 5)
entries = st.builds(
    lambda number, names, cause, detected, published: HistoryEntry(
        generation=generation(number, names, cause, published=0).generation,
        members=tuple(member(name, rank) for rank, name in enumerate(names)),
        detected_at=detected,
        published_at=published,
    ),
    numbers,
    st.sampled_from(["a", "ab", "bc", "abc"]),
    st.sampled_from(Cause),
    times,
    times,
)
resumptions = st.builds(
    Resumption,
    generation=numbers,
    last_step_at=times,
    noticed_at=times,
    assigned_at=times,
    formed_at=times,
    synced_at=times,
    first_step_at=times,
    step_before=st.integers(-1, 9),
    step_resumed=st.integers(0, 9),
    source=st.just("memory"),
)
lines = st.builds(
    MetricLine,
    phase=st.sampled_from(["train", "evaluate"]),
    attempt=st.integers(0, 3),
    generation=numbers,
    step=st.integers(0, 9),
    epoch=st.just(0),
    wall_time=times,
    checkpoint_s=st.floats(0, 20),
)
any_marks = st.builds(
    RunMarks,
    started_at=st.floats(ZERO, ZERO + 50),
    ended_at=st.floats(ZERO, ZERO + 150),
    asked_at=st.none() | times,
    granted_at=st.none() | times,
    teardown_at=st.none() | times,
)


@settings(max_examples=150, deadline=None)
@given(
    run_marks=any_marks,
    history=st.lists(entries, max_size=4, unique_by=lambda entry: entry.generation.number),
    resumed=st.lists(resumptions, max_size=4),
    metric_lines=st.lists(lines, max_size=8),
    outcome=st.sampled_from(Outcome),
)
def test_the_stretches_tile_the_run_whatever_the_facts_are(
    run_marks: RunMarks,
    history: list[HistoryEntry],
    resumed: list[Resumption],
    metric_lines: list[MetricLine],
    outcome: Outcome,
) -> None:
    ledger = fold_ledger(
        record(
            marks=run_marks,
            history=tuple(sorted(history, key=lambda entry: entry.generation.number)),
            resumptions=tuple(resumed),
            lines=tuple(metric_lines),
            closed=Closed(outcome=outcome, exit_code=1, reason="it ended"),
        )
    )
    end = 0
    for stretch in ledger.stretches:
        assert stretch.begin_ms == end
        assert stretch.end_ms > end
        end = stretch.end_ms
    assert end == ledger.wall_ms == max(0, round((run_marks.ended_at - run_marks.started_at) * 1000))
    assert round(sum(ledger.seconds().values()), 3) == ledger.wall_ms / 1000
    for change in ledger.changes:
        assert change.steps_lost >= 0
        assert all(seconds > 0 for seconds in change.seconds.values())
