from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_core.events.attempts import STOPPED, fold_attempts
from elastic_core.events.ledger import Spent
from elastic_core.events.record import AttemptSpan


def span(attempt: int, begin: float, end: float, **seconds: float) -> AttemptSpan:
    return AttemptSpan(attempt=attempt, started_at=begin, ended_at=end, state="preempted", seconds=seconds)


def test_the_time_between_attempts_is_a_class_of_its_own_and_the_whole_sums_up() -> None:
    whole = fold_attempts(
        [span(2, 150, 170, restart=5, redo=5, train=10), span(1, 100, 130, provision=10, train=20)]
    )
    assert [one.attempt for one in whole.spans] == [1, 2]
    assert whole.wall_s == 70
    assert {spent: took for spent, took in whole.seconds.items() if took} == {
        Spent.PROVISION: 10, Spent.TRAIN: 30, Spent.RESTART: 5, Spent.REDO: 5, STOPPED: 20,
    }  # fmt: skip
    assert whole.goodput == pytest.approx(30 / 50)


def test_one_attempt_is_the_whole() -> None:
    whole = fold_attempts([span(1, 100, 110, train=9, teardown=1)])
    assert (whole.wall_s, whole.seconds[STOPPED], whole.goodput) == (10, 0, 0.9)


def test_a_clock_that_was_set_back_makes_no_negative_time() -> None:
    whole = fold_attempts([span(1, 100, 130, train=30), span(2, 120, 140, train=20)])
    assert (whole.seconds[STOPPED], whole.wall_s) == (0, 50)


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), min_size=1, max_size=6))
def test_whatever_the_attempts_took_every_second_from_first_start_to_end_is_in_one_class(
    parts: list[tuple[float, float]],
) -> None:
    spans, now = [], 1_000.0
    for number, (pause, length) in enumerate(parts, start=1):
        now += pause if number > 1 else 0.0
        spans.append(span(number, now, now + length, train=length * 0.75, redo=length * 0.25))
        now += length
    whole = fold_attempts(spans)
    assert whole.wall_s == pytest.approx(now - 1_000.0, rel=1e-9, abs=1e-6)
