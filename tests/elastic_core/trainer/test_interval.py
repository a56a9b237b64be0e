from __future__ import annotations

import pytest

from elastic_core.model.job import CheckpointPolicy
from elastic_core.trainer.interval import FIRST_S, CheckpointInterval, young_daly


@pytest.mark.parametrize(
    ("cost_s", "between_s", "best"),
    [(0.02, 3600, 12.0), (1.0, 3600, 84.2), (10.0, 3600, 261.8), (0.0, 3600, 0.0), (100.0, 30.0, 30.0)],
)
def test_the_best_interval_is_that_of_young_and_daly(cost_s: float, between_s: float, best: float) -> None:
    assert young_daly(cost_s, between_s) == pytest.approx(best, abs=0.1)


def test_no_other_interval_costs_less() -> None:
    def overhead(interval: float) -> float:
        return 2.0 / interval + interval / (2 * 3600)

    best = young_daly(2.0, 3600)
    assert overhead(best) < min(overhead(best * 0.8), overhead(best * 1.25))


def test_a_fixed_number_of_steps_or_seconds_is_kept() -> None:
    by_steps = CheckpointInterval(CheckpointPolicy(every_steps=5), now=0.0)
    assert [by_steps.is_due(step=step, now=1e6) for step in (4, 5, 6, 10)] == [False, True, False, True]
    by_time = CheckpointInterval(CheckpointPolicy(every_seconds=7), now=100.0)
    by_time.cost(stall_s=5.0, write_s=5.0)
    assert [by_time.is_due(step=1, now=now) for now in (106.9, 107.0)] == [False, True]
    by_time.saved(107.0)
    assert not by_time.is_due(step=1, now=113.0)


def test_the_interval_follows_what_a_checkpoint_costs_and_how_often_training_breaks() -> None:
    interval = CheckpointInterval(CheckpointPolicy(), now=0.0)
    assert interval.seconds(1.0) == FIRST_S
    interval.cost(stall_s=0.5, write_s=1.0)
    calm = interval.seconds(1.0)
    assert calm == pytest.approx(60, abs=1)
    for _ in range(8):
        interval.broke()
    assert interval.seconds(1.0) == pytest.approx(calm / 3, rel=0.05)
    assert interval.seconds(80_000.0) > calm * 0.9, "eight failures in a day are few"


def test_a_slow_disk_is_not_written_to_without_pause_nor_a_quick_one_at_every_step() -> None:
    interval = CheckpointInterval(CheckpointPolicy(), now=0.0)
    interval.cost(stall_s=0.001, write_s=30.0)
    assert interval.seconds(0.0) == 300.0
    interval.cost(stall_s=0.00001, write_s=0.00002)
    assert interval.seconds(0.0) == 1.0
