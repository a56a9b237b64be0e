"""A slow node is found within 50 steps, and noise accuses nobody in 1,000."""

import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import example, given, note, settings
from hypothesis import strategies as st

from elastic_core.trainer.pace import Load, Pace, PaceDetector

SHARDS = 8
EVEN_SHARDS = 120
"""Dealt to any of these clusters, nobody gets more than another."""
STEP_S = 0.2
FIXED = 0.3
"""Part of a step that does not depend on the number of samples."""


def noise(chance: random.Random, sigma: float, spikes: float) -> float:
    """A factor: mostly a few per cent, now and then a pause that is many steps long."""
    factor = chance.lognormvariate(0, sigma)
    return factor * (1 + chance.paretovariate(1.2)) if chance.random() < spikes else factor


def steps(
    nodes: int,
    slots: int,
    chance: random.Random,
    *,
    sigma: float,
    spikes: float,
    speed: Callable[[int, int], float],
    total: int = SHARDS,
) -> Iterator[list[Load]]:
    """Yield what each worker reports, step after step; shards are dealt as they come out."""
    ranks, step = nodes * slots, 0
    while True:
        loads = []
        for rank in range(ranks):
            shards = len(range(rank, max(total, ranks), ranks))
            work = STEP_S * (FIXED + (1 - FIXED) * shards * ranks / total) * noise(chance, sigma, spikes)
            loads.append(Load(work * speed(rank // slots, step), 4.0 * shards, float(rank // slots)))
        yield loads
        step += 1


def verdicts(stream: Iterator[list[Load]], count: int) -> list[tuple[int, int, Pace]]:
    """What each worker finds of itself, with the step and its node."""
    detectors: list[PaceDetector] = []
    found = []
    for step, loads in zip(range(count), stream, strict=False):
        detectors = detectors or [PaceDetector() for _ in loads]
        for rank, detector in enumerate(detectors):
            if (pace := detector.look(loads, rank)) is not None:
                found.append((step, int(loads[rank].node), pace))
    return found


CLUSTERS = {"nodes": st.integers(2, 5), "slots": st.integers(1, 2), "number": st.integers(0, 2**32)}
NOISE = {"sigma": st.floats(0.0, 0.3), "spikes": st.floats(0.0, 0.1)}


@settings(max_examples=8, deadline=None)
@given(**CLUSTERS, **NOISE)
@example(nodes=2, slots=1, number=0, sigma=0.3, spikes=0.1)
def test_no_node_is_accused_in_a_thousand_noisy_steps(
    nodes: int, slots: int, number: int, sigma: float, spikes: float
) -> None:
    note(f"seed {number}")
    chance = random.Random(number)
    stream = steps(nodes, slots, chance, sigma=sigma, spikes=spikes, speed=lambda _node, _step: 1.0)
    assert verdicts(stream, 1_000) == []


@settings(max_examples=25, deadline=None)
@given(**CLUSTERS, **NOISE, begins=st.integers(0, 100))
@example(nodes=2, slots=1, number=0, sigma=0.3, spikes=0.1, begins=100)
@example(nodes=2, slots=3, number=0, sigma=0.0, spikes=0.0, begins=0)  # dealt less than the other node
@example(nodes=3, slots=1, number=1, sigma=0.25, spikes=0.0, begins=0)
def test_a_node_throttled_to_half_its_speed_is_found_within_fifty_steps(
    nodes: int, slots: int, number: int, sigma: float, spikes: float, begins: int
) -> None:
    note(f"seed {number}")
    stream = steps(
        nodes,
        slots,
        random.Random(number),
        sigma=sigma,
        spikes=spikes,
        speed=lambda node, step: 2.0 if node == nodes - 1 and step >= begins else 1.0,
        # Who was dealt less is given the benefit of the doubt, which noise can make the whole verdict.
        total=EVEN_SHARDS if sigma or spikes else SHARDS,
    )
    found = verdicts(stream, begins + 50)
    assert {node for _, node, _ in found} == {nodes - 1}
    assert len(found) == slots
    for step, _, pace in found:
        assert begins <= step < begins + 50
        assert pace.is_slow
        assert pace.ratio >= 1.5


def test_a_slow_worker_that_recovers_is_told_of_once_more() -> None:
    detector = PaceDetector()
    told = []
    for step in range(300):
        own = 0.4 if 50 <= step < 150 else 0.2
        if (pace := detector.look([Load(0.2, 4, 0), Load(own, 4, 1)], 1)) is not None:
            told.append((step, pace))
    (found, slow), (ended, again) = told
    assert (found, ended) == (72, 174)
    # 23 of the 40 looks were slow: of the middle 24 looks 15 are, and 2 ** (15 / 24) is their mean
    assert slow == Pace(is_slow=True, ratio=pytest.approx(2 ** (15 / 24)), seconds=0.4, others=0.2)
    assert not again.is_slow


def test_who_was_dealt_more_is_not_slow_and_who_was_dealt_less_can_be() -> None:
    more, less = Load(0.4, 8, 0), Load(0.25, 4, 1)
    assert judged([more, less, Load(0.25, 4, 2)], 0) is None
    assert judged([more, less, Load(0.25, 4, 2)], 1) is None
    assert judged([more, Load(0.5, 4, 1), Load(0.25, 4, 2)], 1) is not None


def test_workers_of_one_node_are_not_compared_with_each_other() -> None:
    assert judged([Load(0.2, 4, 0), Load(0.4, 4, 0)], 1) is None


def test_steps_too_short_to_be_measured_are_put_together() -> None:
    detector = PaceDetector()
    loads = [Load(0.001, 4, 0), Load(0.002, 4, 1)]
    found = [step for step in range(1_000) if detector.look(loads, 1) is not None]
    assert found == [40 * 7 - 1]  # 7 steps of 2 ms are the first look of 12.5 ms


def test_a_worker_that_finished_no_step_yet_is_not_compared() -> None:
    assert judged([Load(), Load(0.4, 4, 1)], 1) is None


def judged(loads: list[Load], rank: int) -> Pace | None:
    detector = PaceDetector()
    return next((pace for _ in range(60) if (pace := detector.look(loads, rank)) is not None), None)
