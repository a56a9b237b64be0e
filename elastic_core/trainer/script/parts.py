"""What a script's state is made of: anything with `state_dict` and `load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch
from torch.nn.parallel import DistributedDataParallel

from elastic_core.errors import RefusedInput

_REMEDY = "put it back, or begin anew in another directory"


class Stateful(Protocol):
    """A model, an optimizer, a schedule, an average of weights."""

    def state_dict(self) -> Any:
        """Return the state: dicts, lists, tensors, numbers, strings."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Take over a state."""
        ...


def unwrapped(part: Stateful) -> Stateful:
    """Return the model in its wrapper, so that its names are the same with one worker and with many."""
    return part.module if isinstance(part, DistributedDataParallel) else part


class Boundary:
    """Knows whether the parts are as the last finished step left them.

    A forward pass in training mode moves running statistics, an optimizer's step the weights.
    """

    def __init__(self, parts: Iterable[Stateful]) -> None:
        self.is_here = True
        for part in parts:
            if isinstance(part, torch.nn.Module) and not isinstance(part, torch.jit.ScriptModule):
                part.register_forward_pre_hook(self._leave)
            elif isinstance(part, torch.optim.Optimizer):
                part.register_step_pre_hook(self._leave)

    def _leave(self, part: Any, *_: Any) -> None:
        if not isinstance(part, torch.nn.Module) or part.training:
            self.is_here = False


def load_parts(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> None:
    """Give each part its state; nothing is loaded if a part's name or a tensor's shape does not fit.

    Raises:
        RefusedInput: The state is of another training; the message names the first mismatch.
    """
    problem = next(_mismatches(parts, states), None)
    if problem is not None:
        raise RefusedInput([problem])
    for name, part in parts.items():
        try:
            part.load_state_dict(states[name])
        except (ValueError, KeyError, RuntimeError, TypeError) as error:
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise RefusedInput([f"{name}: its saved state does not fit ({first}): {_REMEDY}"]) from error


def _mismatches(parts: Mapping[str, Stateful], states: Mapping[str, Any]) -> Iterator[str]:
    for name in states:
        if name not in parts:
            yield f"{name}: it was saved and elastic.Snapshot() is not given it now: {_REMEDY}"
    for name, part in parts.items():
        if name not in states:
            yield f"{name}: elastic.Snapshot() is given it now and it was not saved: {_REMEDY}"
        elif isinstance(part, torch.nn.Module):
            yield from _tensor_mismatches(name, part.state_dict(), states[name])


def _tensor_mismatches(part: str, mine: Mapping[str, Any], saved: Mapping[str, Any]) -> Iterator[str]:
    for name in (*mine, *(name for name in saved if name not in mine)):
        old, new = _shape(saved.get(name)), _shape(mine.get(name))
        if old != new:
            yield f"{part}.{name}: {old} in the saved state → {new} now: {_REMEDY}"


def _shape(value: Any) -> str:
    if value is None:
        return "not there"
    return f"shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
