from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_core.trainer.order import (
    batch_positions,
    epoch_order,
    global_batch,
    ids_of_rank,
    shards_of,
    steps_per_epoch,
)


def trained(
    samples: int, batch_size: int, shards: int, worlds: Iterable[int], *, epoch: int = 0
) -> list[int]:
    """Return the ids that all ranks train in an epoch whose step k runs at the k-th world size."""
    order = epoch_order(samples, 7, epoch)
    ids: list[int] = []
    for number, world_size in zip(range(steps_per_epoch(samples, batch_size)), worlds, strict=True):
        batch = global_batch(order, number, batch_size)
        for rank in range(world_size):
            ids += ids_of_rank(batch, rank=rank, world_size=world_size, shards=shards)
    return ids


@st.composite
def epochs_with_changes(draw: st.DrawFn) -> tuple[int, int, int, list[int]]:
    samples = draw(st.integers(1, 200))
    batch_size = draw(st.integers(1, 64))
    shards = draw(st.integers(1, 24))
    steps = steps_per_epoch(samples, batch_size)
    worlds = draw(st.lists(st.integers(1, shards), min_size=steps, max_size=steps))
    return samples, batch_size, shards, worlds


@given(epochs_with_changes())
def test_each_sample_is_trained_once_an_epoch_through_any_sequence_of_world_sizes(
    epoch: tuple[int, int, int, list[int]],
) -> None:
    samples, batch_size, shards, worlds = epoch
    assert Counter(trained(samples, batch_size, shards, worlds)) == Counter(range(samples))


@given(
    batch=st.lists(st.integers(0, 10**6), max_size=40),
    shards=st.integers(1, 24),
    worlds=st.tuples(st.integers(1, 24), st.integers(1, 24)),
)
def test_a_global_batch_is_the_same_set_of_samples_at_every_world_size(
    batch: list[int], shards: int, worlds: tuple[int, int]
) -> None:
    def at(world_size: int) -> list[int]:
        ranks = range(world_size)
        parts = [ids_of_rank(batch, rank=rank, world_size=world_size, shards=shards) for rank in ranks]
        return sorted(index for part in parts for index in part)

    assert at(min(worlds[0], shards)) == at(min(worlds[1], shards)) == sorted(batch)


@given(shards=st.integers(1, 64), world_size=st.integers(1, 64))
def test_every_rank_has_a_shard_or_the_world_is_refused(shards: int, world_size: int) -> None:
    if world_size > shards:
        with pytest.raises(ValueError, match=f"{world_size} workers cannot share {shards} virtual shards"):
            shards_of(0, world_size, shards)
        return
    dealt = [shards_of(rank, world_size, shards) for rank in range(world_size)]
    assert all(len(numbers) >= 1 for numbers in dealt)
    assert sorted(number for numbers in dealt for number in numbers) == list(range(shards))


@pytest.mark.case("S01")
@pytest.mark.parametrize("finished", [1, 15, 16, 63])
def test_going_from_four_workers_to_two_repeats_and_loses_no_sample(finished: int) -> None:
    """S01: torch's own elastic sampler repeated 12 and lost 12 of 64 with these numbers."""
    assert sorted(trained(64, 1, 4, [4] * finished + [2] * (64 - finished))) == list(range(64))


@pytest.mark.case("S02")
def test_going_from_one_worker_to_two_in_mid_epoch_skips_no_batch() -> None:
    """S02: 16 samples, batches of 4; elsewhere samples 4-7 were skipped after 0-3."""
    order = list(range(16))
    first = ids_of_rank(global_batch(order, 0, 4), rank=0, world_size=1, shards=4)
    second = [ids_of_rank(global_batch(order, 1, 4), rank=rank, world_size=2, shards=4) for rank in (0, 1)]
    assert first == [0, 1, 2, 3]
    assert second == [[4, 6], [5, 7]]


@pytest.mark.case("S04")
def test_epochs_after_a_resumed_one_start_at_their_beginning() -> None:
    """S04: resume at sample 40 of 64 in epoch 1; epochs 2 and 3 have all 64."""
    resumed = trained(64, 8, 4, [3] * 8, epoch=1)[40:]
    assert len(resumed) == 24
    for epoch in (2, 3):
        assert sorted(trained(64, 8, 4, [2] * 8, epoch=epoch)) == list(range(64))


@pytest.mark.case("S05")
def test_progress_means_the_same_samples_at_every_world_size() -> None:
    """S05: after 5 steps at four workers, two workers go on with sample 40, not with another."""
    at_four = trained(64, 8, 4, [4] * 8)[:40]
    assert sorted(at_four) == sorted(trained(64, 8, 4, [2] * 8)[:40])


def test_a_last_batch_smaller_than_the_world_leaves_ranks_without_samples() -> None:
    batch = global_batch(list(range(10)), 1, 8)
    ids = [ids_of_rank(batch, rank=rank, world_size=3, shards=4) for rank in range(3)]
    assert ids == [[8], [9], []]


def test_the_order_depends_on_seed_and_epoch_only() -> None:
    assert epoch_order(100, 1, 2) == epoch_order(100, 1, 2)
    orders = {tuple(epoch_order(100, seed, epoch)) for seed in (0, 1, 2) for epoch in (0, 1, 2)}
    assert len(orders) == 9
    assert sorted(epoch_order(5, 0, 0)) == [0, 1, 2, 3, 4]


def test_an_order_never_changes_between_versions() -> None:
    """A checkpoint of an older version must go on with the samples that are left of its epoch."""
    assert epoch_order(10, 0, 0) == [2, 1, 6, 3, 7, 0, 4, 9, 8, 5]


def test_a_step_beyond_the_epoch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"step 2 is not in an epoch of 10 samples with 5 a step: .* 0\.\.1"):
        batch_positions(2, 5, 10)
