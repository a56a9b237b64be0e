"""Snapshots in memory that outlives the worker: the agent's fork server holds it, the next worker finds it.

Two files without a name take turns, so that a worker killed in the middle of a copy
leaves the one before whole. A file is a head, an outline in JSON, and the tensors as
bytes; its sequence number is written last, and a file without one is no snapshot.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any, Final

import torch

from elastic_core.trainer.snapshot import Layout, put_together, take_apart

_HEAD: Final = struct.Struct("<QQQ")
"""Sequence number (0: nothing whole), bytes of the outline, bytes of the tensors."""

_START: Final = 64
"""Where the outline begins; the tensors begin at a multiple of it."""

_PART: Final = 0.05
"""Snapshots may cost so much of the time of the steps between them."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mark:
    """When a snapshot was taken; the newest state has the highest mark.

    Attributes:
        step: Finished steps.
        attempt: The launch of the run that took it, and the generation in it.
        wall_time: When the last of the steps was finished.
    """

    step: int
    attempt: int
    generation: int
    wall_time: float


class MemorySnapshots:
    """The memory of one worker, by the descriptors that its agent gave it; without any it keeps nothing."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        self._descriptors = tuple(descriptors)
        self._sequence = 0
        self._maps: dict[int, tuple[int, memoryview, torch.Tensor]] = {}

    @classmethod
    def from_text(cls, text: str) -> MemorySnapshots:
        """Return the memory that the agent's variable names; "" names none."""
        return cls([int(part) for part in text.split(",") if part])

    @classmethod
    def new(cls) -> MemorySnapshots:
        """Return memory that ends with this process."""
        return cls([os.memfd_create("snapshot") for _ in range(2)])

    def newest(self) -> tuple[Mark, Any] | None:
        """Return the newest whole snapshot, as a copy of its own, or None."""
        heads = {descriptor: self._head(descriptor) for descriptor in self._descriptors}
        self._sequence = max((sequence for sequence, _, _ in heads.values()), default=0)
        for descriptor, (sequence, outline, size) in heads.items():
            if sequence and sequence == self._sequence:
                text, flat = self._map(descriptor, outline, size)
                content = json.loads(bytes(text))
                layout = Layout.from_json(json.dumps(content["layout"]).encode())
                tensors = [tensor.clone() for tensor in layout.views(flat)]
                return Mark(**content["mark"]), put_together(layout.outline, tensors)
        return None

    def keep(self, state: Any, mark: Mark) -> None:
        """Replace the older snapshot by a copy of a state.

        Raises:
            TypeError: The state holds something that is not plain.
            OSError: There is not enough memory; the other snapshot is untouched.
        """
        if not self._descriptors:
            return
        parts = take_apart(state)
        layout = Layout.of(parts)
        content = {"mark": asdict(mark), "layout": json.loads(layout.to_json())}
        outline = json.dumps(content).encode()
        outline += b" " * (-len(outline) % _START)  # so that the tensors are aligned
        self._sequence += 1
        descriptor = self._descriptors[self._sequence % len(self._descriptors)]
        os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, _START + len(outline) + layout.size))
        os.pwrite(descriptor, _HEAD.pack(0, len(outline), layout.size), 0)
        text, flat = self._map(descriptor, len(outline), layout.size)
        text[:] = outline
        for view, tensor in zip(layout.views(flat), parts.tensors, strict=True):
            view.copy_(tensor)
        os.pwrite(descriptor, struct.pack("<Q", self._sequence), 0)

    @staticmethod
    def _head(descriptor: int) -> tuple[int, int, int]:
        head = os.pread(descriptor, _HEAD.size, 0)
        return _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0, 0)

    def _map(self, descriptor: int, outline: int, size: int) -> tuple[memoryview, torch.Tensor]:
        """Return the outline's bytes and the tensors' as one tensor; both are the file itself.

        The mapping is kept: fresh pages cost more than the copy.
        """
        length = _START + outline + size
        kept = self._maps.get(descriptor)
        if kept is None or kept[0] != length:
            memory = memoryview(mmap.mmap(descriptor, length))
            kept = self._maps[descriptor] = (length, memory, torch.frombuffer(memory, dtype=torch.uint8))
        _, memory, whole = kept
        return memory[_START : _START + outline], whole[_START + outline :]


class Pace:
    """After how many steps the next snapshot is worth its time: every one, unless copying is slow."""

    def __init__(self, every: int = 0) -> None:
        """Begin to measure.

        Args:
            every: Fixed number of steps; 0: as cost says.
        """
        self._fixed = every
        self._step_s = 0.0
        self._copy_s = 0.0

    def stepped(self, seconds: float) -> None:
        """Learn what a step takes."""
        self._step_s = _smoothed(self._step_s, seconds)

    def copied(self, seconds: float) -> None:
        """Learn what a snapshot takes."""
        self._copy_s = _smoothed(self._copy_s, seconds)

    @property
    def every(self) -> int:
        """Steps from one snapshot to the next."""
        if self._fixed or not self._step_s or not self._copy_s:
            return self._fixed or 1
        return max(1, ceil(self._copy_s / (_PART * self._step_s)))


def _smoothed(old: float, new: float) -> float:
    return new if not old else 0.8 * old + 0.2 * new
