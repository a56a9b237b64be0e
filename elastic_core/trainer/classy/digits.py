"""The quick start's data: 1,797 real handwritten digits, in memory at once.

Optical Recognition of Handwritten Digits, UCI Machine Learning Repository (E. Alpaydin,
C. Kaynak, 1998), CC BY 4.0: 8 x 8 images of 17 grey levels, from 43 writers. The file
`digits.npz` holds them in one fixed shuffled order; the last 360 are held out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch
from torch.nn.functional import interpolate

from elastic_core.trainer.classy.compat import ClassyDataset, register_dataset
from elastic_core.trainer.classy.transforms import sample_transform

FILE: Final = Path(__file__).with_name("digits.npz")
HELD_OUT: Final = 360
SIZE: Final = 16
"""Side of the images as they come out: twice the original, with three equal channels."""

_LEVELS: Final = 16.0
_MEAN: Final = 0.305
_DEVIATION: Final = 0.37


def load_digits(split: Literal["train", "test"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised images (n, 3, 16, 16) and labels (n,) of one split."""
    with np.load(FILE) as data:
        images, labels = torch.from_numpy(data["images"]), torch.from_numpy(data["labels"])
    part = slice(-HELD_OUT, None) if split == "test" else slice(None, -HELD_OUT)
    scaled = interpolate(images[part].float().div_(_LEVELS).unsqueeze(1), size=(SIZE, SIZE), mode="bilinear")
    return scaled.sub_(_MEAN).div_(_DEVIATION).repeat(1, 3, 1, 1), labels[part].long()


class Pairs:
    """Images and labels in memory, as samples."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self._images = images
        self._labels = labels.tolist()

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input": self._images[index], "target": self._labels[index]}


@register_dataset("digits")
class DigitsDataset(ClassyDataset):  # type: ignore[misc]  # Classy Vision has no types
    """`{"name": "digits", "split": "train" | "test", …}`: samples are dicts of input and target."""

    in_memory = True
    classes = tuple("0123456789")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> DigitsDataset:
        """Build a split from its section of a config."""
        split = config.get("split")
        if split not in ("train", "test"):
            raise ValueError(f'"split" of the digits is {split!r}: use "train" or "test"')
        transform_config, batch, shuffle, num_samples = cls.parse_config(config)
        transform = sample_transform(transform_config) if transform_config else None
        return cls(Pairs(*load_digits(split)), batch, bool(shuffle), transform, num_samples)
