"""Which samples a step trains, and which of them a rank: functions of numbers alone.

An epoch's order depends on (seed, epoch), step k of an epoch owns the k-th global
batch of it, and a batch is cut into fixed virtual shards that are dealt to the ranks.
The world size only decides who computes a shard, so each sample is trained once
an epoch through any sequence of membership changes, and where training stands is
one number: finished steps, each of a known number of samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def epoch_order(samples: int, seed: int, epoch: int) -> list[int]:
    """Return the ids 0..samples-1 in the order in which an epoch trains them."""
    digest = hashlib.blake2b(f"{seed}/order/{epoch}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def steps_per_epoch(samples: int, batch_size: int) -> int:
    """Return how many steps an epoch has: nothing is dropped and nothing is padded."""
    return -(-samples // batch_size)


def batch_positions(number: int, batch_size: int, samples: int) -> range:
    """Return the positions in the epoch's order that step `number` of an epoch owns.

    Raises:
        ValueError: The epoch has no such step.
    """
    if not 0 <= number < steps_per_epoch(samples, batch_size):
        raise ValueError(
            f"step {number} is not in an epoch of {samples} samples with {batch_size} a step: "
            f"it has steps 0..{steps_per_epoch(samples, batch_size) - 1}"
        )
    return range(number * batch_size, min((number + 1) * batch_size, samples))


def global_batch(order: Sequence[int], number: int, batch_size: int) -> Sequence[int]:
    """Return the ids of step `number` of an epoch, over all ranks; the last step may have fewer."""
    positions = batch_positions(number, batch_size, len(order))
    return order[positions.start : positions.stop]


def shard(batch: Sequence[int], number: int, shards: int) -> Sequence[int]:
    """Return virtual shard `number` of a batch: every `shards`-th id; in a short batch it may be empty."""
    return batch[number::shards]


def shards_of(rank: int, world_size: int, shards: int) -> range:
    """Return the numbers of the shards that a rank computes in every step.

    Raises:
        ValueError: There are more ranks than shards, so that this or another rank would have none.
    """
    if world_size > shards:
        raise ValueError(
            f"{world_size} workers cannot share {shards} virtual shards: raise virtual_shards or use fewer"
        )
    return range(rank, shards, world_size)


def ids_of_rank(batch: Sequence[int], *, rank: int, world_size: int, shards: int) -> list[int]:
    """Return the ids of a batch that a rank trains, shard after shard."""
    numbers = shards_of(rank, world_size, shards)
    return [index for number in numbers for index in shard(batch, number, shards)]
