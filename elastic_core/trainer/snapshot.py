"""Nested states taken apart and put together: an outline in JSON, and plain tensors.

A state is what `Trainee.state_dict` returns: dicts, lists, tuples, tensors, numbers,
strings, booleans and None. Nothing else is accepted, so a state crosses a socket and
lies in a file without any code in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

_ALIGNMENT: Final = 64
"""Bytes: every tensor starts at a multiple, whatever its dtype."""

_PLAIN: Final = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class Parts:
    """A state taken apart.

    Attributes:
        outline: The nesting, as JSON values; tensors are numbers into `tensors`.
        tensors: The state's own tensors, not copies.
    """

    outline: Any
    tensors: list[torch.Tensor]


def take_apart(state: Any) -> Parts:
    """Return the outline and the tensors of a state.

    Raises:
        TypeError: Something in it is none of the plain types; the message says where.
    """
    tensors: list[torch.Tensor] = []
    return Parts(_outline(state, "state", tensors), tensors)


def put_together(outline: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """Return the state that `take_apart` was given, on other tensors.

    Raises:
        ValueError: The outline is none that `take_apart` made.
    """
    match outline:
        case ["tensor", int(number)] if 0 <= number < len(tensors):
            return tensors[number]
        case ["value", value]:
            return value
        case ["dict", list(items)]:
            return {key: put_together(value, tensors) for key, value in items}
        case ["list", list(items)]:
            return [put_together(value, tensors) for value in items]
        case ["tuple", list(items)]:
            return tuple(put_together(value, tensors) for value in items)
    raise ValueError(f"not the outline of a state: {str(outline)[:100]}")


def _outline(value: Any, place: str, tensors: list[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors.append(value.detach())
        return ["tensor", len(tensors) - 1]
    if type(value) in _PLAIN:  # not isinstance: a NumPy float is a float, but not plain
        return ["value", value]
    if isinstance(value, Mapping):
        for key in value:
            if type(key) not in _PLAIN:
                raise TypeError(
                    f"{place} has the key {key!r} of type {type(key).__name__}: use text or numbers"
                )
        return ["dict", [[key, _outline(item, f"{place}.{key}", tensors)] for key, item in value.items()]]
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return [kind, [_outline(item, f"{place}.{index}", tensors) for index, item in enumerate(value)]]
    raise TypeError(
        f"{place} is of type {type(value).__module__}.{type(value).__qualname__}: a state holds dicts, "
        "lists, tuples, tensors, numbers, strings, booleans and None only"
    )


# ---- one flat tensor -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Layout:
    """What a receiver must know to rebuild a state from one flat tensor of bytes."""

    outline: Any
    kinds: tuple[tuple[str, tuple[int, ...]], ...]

    @classmethod
    def of(cls, parts: Parts) -> Layout:
        """Return the layout of a state."""
        kinds = ((str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for tensor in parts.tensors)
        return cls(parts.outline, tuple(kinds))

    def to_json(self) -> bytes:
        """Return the layout as JSON."""
        return json.dumps([self.outline, self.kinds]).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Layout:
        """Return the layout that `to_json` wrote."""
        outline, kinds = json.loads(data)
        return cls(outline, tuple((name, tuple(shape)) for name, shape in kinds))

    @property
    def size(self) -> int:
        """Bytes of the flat tensor."""
        return sum(self._room(*kind) for kind in self.kinds)

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors as views into a flat tensor of bytes."""
        views, start = [], 0
        for name, shape in self.kinds:
            dtype: torch.dtype = getattr(torch, name)
            length = _count(shape) * dtype.itemsize
            views.append(flat[start : start + length].view(dtype).view(shape))
            start += self._room(name, shape)
        return views

    @staticmethod
    def _room(name: str, shape: tuple[int, ...]) -> int:
        length: int = _count(shape) * getattr(torch, name).itemsize
        return -(-length // _ALIGNMENT) * _ALIGNMENT


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


# ---- copies in host memory -------------------------------------------------------------------


class HostBuffers:
    """Memory for one copy of a state, reused from copy to copy: fresh pages cost more than the copy."""

    def __init__(self) -> None:
        self._buffers: list[torch.Tensor] = []

    def copy(self, state: Any) -> Any:
        """Return a copy of a state in host memory; the next call overwrites it.

        Raises:
            TypeError: The state holds something that is not plain.
        """
        parts = take_apart(state)
        if not self._fit(parts.tensors):
            self._buffers = [
                torch.zeros(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                for tensor in parts.tensors
            ]
        for buffer, tensor in zip(self._buffers, parts.tensors, strict=True):
            buffer.copy_(tensor, non_blocking=True)
        if any(tensor.is_cuda for tensor in parts.tensors):
            torch.cuda.current_stream().synchronize()
        return put_together(parts.outline, self._buffers)

    def _fit(self, tensors: list[torch.Tensor]) -> bool:
        kinds = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return [(buffer.shape, buffer.dtype) for buffer in self._buffers] == kinds
