"""Random numbers that depend on what is computed, never on who computes it or when.

A draw of augmentation belongs to (seed, epoch, sample), a draw of dropout or mixup to
(seed, epoch, step, shard). So any world size, and any resumption, draws the same.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_NUMPY_SEEDS = 1 << 32


def derive(seed: int, purpose: str, *place: int) -> int:
    """Return a seed of 63 bits for one purpose at one place."""
    text = "/".join([str(seed), purpose, *map(str, place)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def seed_all(value: int) -> None:
    """Seed every generator that transforms and layers draw from."""
    # not torch.manual_seed: without CUDA it queues a formatted traceback for CUDA at every call
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(value)
    random.seed(value)
    np.random.seed(value % _NUMPY_SEEDS)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Put the generators back as they were at the end, so that seeding inside touches nothing outside."""
    with torch.random.fork_rng(devices=[]):
        of_python, of_numpy = random.getstate(), np.random.get_state()
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)
