from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_core.errors import RefusedInput
from elastic_core.trainer.script.sampler import ElasticSampler


class Place:
    def __init__(self, *, step: int = 0, rank: int = 0, world_size: int = 1) -> None:
        self.step, self.rank, self.world_size = step, rank, world_size
        self.begun: list[tuple[int, int, list[int]]] = []
        self.total = 0

    def expect(self, total: int) -> None:
        self.total = total

    def begin_step(self, step: int, epoch: int, ids: Sequence[int]) -> None:
        self.begun.append((step, epoch, list(ids)))


@given(
    samples=st.integers(1, 200),
    global_batch=st.integers(1, 64),
    worlds=st.lists(st.integers(1, 8), min_size=1, max_size=12),
)
def test_each_sample_is_used_once_an_epoch_through_any_sequence_of_worlds(
    samples: int, global_batch: int, worlds: list[int]
) -> None:
    steps = -(-samples // global_batch)
    smallest = samples // steps
    used: list[int] = []
    for step in range(2 * steps):
        world = min(worlds[step % len(worlds)], smallest)
        for rank in range(world):
            place = Place(step=step, rank=rank, world_size=world)
            used += next(iter(ElasticSampler(place, samples, global_batch=global_batch)))
    first, second = used[:samples], used[samples:]
    assert sorted(first) == sorted(second) == list(range(samples))


@pytest.mark.case("S02")
def test_the_step_after_a_change_of_the_world_is_the_next_one() -> None:
    """16 samples in batches of 4: after one worker had 0-3, two have 4-7, and not 8-11."""
    alone = ElasticSampler(Place(), 16, global_batch=4, shuffle=False)
    assert next(iter(alone)) == [0, 1, 2, 3]
    pair = [
        ElasticSampler(Place(step=1, rank=rank, world_size=2), 16, global_batch=4, shuffle=False)
        for rank in range(2)
    ]
    assert [list(sampler) for sampler in pair] == [[[4, 6], [8, 10], [12, 14]], [[5, 7], [9, 11], [13, 15]]]


@pytest.mark.case("C08")
def test_who_resumes_in_mid_epoch_gets_the_samples_that_were_to_come() -> None:
    undisturbed = ElasticSampler(Place(), 64, global_batch=4)
    first = list(undisturbed)
    resumed = ElasticSampler(Place(step=5), 64, global_batch=4)
    assert list(resumed) == first[5:]
    resumed._cursor.step = 16  # type: ignore[misc]
    resumed.set_epoch(1)
    second = list(resumed)
    assert sorted(id_ for ids in second for id_ in ids) == list(range(64))
    assert second != first, "the next epoch has an order of its own"


@pytest.mark.case("S04")
def test_an_epoch_after_a_resumed_one_begins_at_its_beginning() -> None:
    place = Place(step=5)
    sampler = ElasticSampler(place, 64, global_batch=8)
    seen = {}
    for epoch in sampler.epochs(3):
        seen[epoch] = 0
        for ids in sampler:
            seen[epoch] += len(ids)
            place.step += 1
    assert seen == {0: 24, 1: 64, 2: 64}
    assert place.total == 24


def test_batches_differ_by_one_sample_at_most_and_weights_make_their_means_one() -> None:
    sizes = [len(ids) for ids in ElasticSampler(Place(), 50, global_batch=8)]
    assert (sum(sizes), set(sizes)) == (50, {7, 8})
    for rank, part in ((0, 3), (1, 2), (2, 2)):
        sampler = ElasticSampler(Place(rank=rank, world_size=3), 50, global_batch=8)
        assert sampler.weight() == pytest.approx(part * 3 / 7)


def test_epochs_trained_before_a_restart_have_nothing_left() -> None:
    sampler = ElasticSampler(Place(step=3), 8, global_batch=4)
    lengths = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        lengths.append((len(sampler), len(list(sampler))))
        if epoch == 1:
            sampler._cursor.step = 4  # type: ignore[misc]  # the step was reported
    assert lengths == [(0, 0), (1, 1), (2, 2)]


def test_steps_that_are_not_reported_are_an_error_that_says_what_to_do() -> None:
    sampler = ElasticSampler(Place(), 8, global_batch=4)
    epochs = sampler.epochs(1)
    assert next(epochs) == 0
    assert len(list(sampler)) == 2
    with pytest.raises(RuntimeError, match=r"2 steps .* elastic\.step\(\) was called for 0: call it once"):
        next(epochs)


def test_a_batch_too_small_for_the_workers_is_refused() -> None:
    with pytest.raises(RefusedInput, match="too few for 5 workers: raise global_batch"):
        ElasticSampler(Place(world_size=5), 50, global_batch=4)
