"""Batches of samples: moving them to a device, counting what a model got right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch


def move(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, Mapping):
        return {key: move(entry, device) for key, entry in value.items()}
    return [move(entry, device) for entry in value] if isinstance(value, list | tuple) else value


def count_correct(output: Any, target: torch.Tensor) -> float:
    """Return how many samples' highest output is their label (of a mixed label: its larger part)."""
    if not isinstance(output, torch.Tensor) or output.ndim != 2:
        return 0.0
    labels = target if target.ndim == 1 else target.argmax(1)
    return float((output.argmax(1) == labels).sum())
