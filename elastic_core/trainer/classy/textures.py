"""A second data set that ships: patches of three photographs, to be told apart by their texture.

Brick, grass and gravel, 512 x 512 grey levels, by CC0Textures (CC0) as scikit-image distributes
them, here at half the resolution. A sample is a patch of 16 x 16; training patches come from the left
three quarters of a photograph and overlap, held-out ones from the right quarter, so no pixel is in both.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import torch

from elastic_core.trainer.classy.compat import ClassyDataset, register_dataset
from elastic_core.trainer.classy.digits import Pairs
from elastic_core.trainer.classy.transforms import sample_transform

FILE: Final = Path(__file__).with_name("textures.npz")
SIZE: Final = 16
STRIDE: Final = 8

_HELD_OUT_FROM: Final = 192
"""Column of a photograph of 256 columns."""

_MEAN: Final = 119.0
_DEVIATION: Final = 33.0


def load_textures(split: Literal["train", "test"]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return normalised patches (n, 3, 16, 16) and labels (n,) of one split."""
    with np.load(FILE) as data:
        photographs = torch.from_numpy(data["images"]).float()
    part = slice(_HELD_OUT_FROM, None) if split == "test" else slice(None, _HELD_OUT_FROM)
    patches = photographs[:, :, part].unfold(1, SIZE, STRIDE).unfold(2, SIZE, STRIDE)
    images = patches.flatten(1, 2).flatten(0, 1).sub(_MEAN).div(_DEVIATION).unsqueeze(1)
    labels = torch.arange(len(photographs)).repeat_interleave(len(images) // len(photographs))
    return images.repeat(1, 3, 1, 1), labels


@register_dataset("textures")
class TexturesDataset(ClassyDataset):  # type: ignore[misc]  # Classy Vision has no types
    """`{"name": "textures", "split": "train" | "test", …}`: samples are dicts of input and target."""

    in_memory = True
    classes = ("brick", "grass", "gravel")

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TexturesDataset:
        """Build a split from its section of a config."""
        split = config.get("split")
        if split not in ("train", "test"):
            raise ValueError(f'"split" of the textures is {split!r}: use "train" or "test"')
        transform_config, batch, shuffle, num_samples = cls.parse_config(config)
        transform = sample_transform(transform_config) if transform_config else None
        return cls(Pairs(*load_textures(split)), batch, bool(shuffle), transform, num_samples)
