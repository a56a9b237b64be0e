"""Transforms as configs write them, on samples that are dicts of input and target."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from elastic_core.trainer.classy.compat import build_transforms


def sample_transform(config: list[dict[str, Any]]) -> Callable[[Any], Any]:
    """Return transforms for a sample: Classy Vision's on the whole of it, torchvision's on its image."""
    transform, first = build_transforms(config), config[0].get("name")
    if first == "generic_image_transform":
        return _Adapted(transform, takes="pair")
    if first in ("apply_transform_to_key", "tuple_to_map"):
        return _Adapted(transform, takes="sample")
    return _Adapted(transform, takes="image")


@dataclass(frozen=True, slots=True)
class _Adapted:
    """A transform with what it takes; a class, for loader processes may have to pickle it."""

    transform: Callable[[Any], Any]
    takes: Literal["sample", "pair", "image"]

    def __call__(self, sample: dict[str, Any]) -> Any:
        if self.takes == "sample":
            return self.transform(sample)
        if self.takes == "pair":
            return self.transform((sample["input"], sample["target"]))
        return {**sample, "input": self.transform(sample["input"])}
