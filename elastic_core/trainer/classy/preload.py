"""What a fork server imports and uses once, so that a forked Classy Vision worker starts at once.

Importing this module takes seconds and leaves no thread behind: no OpenMP pool is
made (that needs more than one torch thread) and CUDA is not touched.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch.nn.functional import cross_entropy

import elastic_core.trainer.classy.worker  # noqa: F401  # to be there after a fork, with all it needs
from elastic_core.trainer.classy.compat import OPTIMIZER_REGISTRY
from elastic_core.trainer.classy.digits import load_digits
from elastic_core.trainer.classy.seeds import random_state_kept

_GPU_DEVICES: Final = ("/dev/nvidia0", "/dev/kfd")


def use_once() -> None:
    """Run one step of a tiny model: first use loads kernels and modules, and each optimizer has its own."""
    with random_state_kept():
        _use_once()


def _use_once() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, padding=1),
        torch.nn.BatchNorm2d(4),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d(1),
        torch.nn.Flatten(),
        torch.nn.Linear(4, 2),
    )
    images, labels = torch.ones(2, 3, 8, 8), torch.tensor([0, 1])
    for name in ("sgd", "adamw"):
        optimizer = OPTIMIZER_REGISTRY[name].from_config({"name": name, "lr": 0.1})
        optimizer.set_param_groups(model.parameters())
        torch.autograd.backward(cross_entropy(model(images), labels))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(where=0.0)
    load_digits("test")


if torch.get_num_threads() == 1 and not any(Path(device).exists() for device in _GPU_DEVICES):
    use_once()  # with more threads it would make a pool, and with a GPU a backward pass looks for it
