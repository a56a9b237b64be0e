"""Which EC2 types have which GPUs: what a foreign file asks for, and what may not be asked of a type."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

TYPES: Final[Mapping[str, tuple[tuple[int, str], ...]]] = {
    "T4": ((1, "g4dn.xlarge"), (4, "g4dn.12xlarge"), (8, "g4dn.metal")),
    "A10G": ((1, "g5.xlarge"), (4, "g5.12xlarge"), (8, "g5.48xlarge")),
    "L4": ((1, "g6.xlarge"), (4, "g6.12xlarge"), (8, "g6.48xlarge")),
    "V100": ((1, "p3.2xlarge"), (4, "p3.8xlarge"), (8, "p3.16xlarge")),
    "A100": ((8, "p4d.24xlarge"),),
    "H100": ((8, "p5.48xlarge"),),
}
"""Smallest type by model and number of GPUs."""

_WITH_GPU: Final = re.compile(r"^(p[2-9]|g[3-9]|gr[0-9])[a-z]*\.")


def has_gpu(instance_type: str) -> bool:
    """Return whether an EC2 type has a GPU, by its family."""
    return bool(_WITH_GPU.match(instance_type))


def type_with(model: str, count: int) -> tuple[int, str] | None:
    """Return the smallest type with at least `count` GPUs of a model, and how many it has."""
    return next((entry for entry in TYPES.get(model.upper(), ()) if entry[0] >= count), None)
