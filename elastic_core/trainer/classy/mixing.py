"""Mixup and CutMix over a shard, whatever its size."""

from __future__ import annotations

from typing import Any

import torch

from elastic_core.trainer.classy.compat import MixupTransform, mixup_target


def mix(transform: MixupTransform, sample: dict[str, Any]) -> dict[str, Any]:
    """Mix the samples of a shard in pairs.

    Classy Vision refuses odd batches. A shard of a short last batch may be odd: its last sample
    then stays as it is, with a label of the same form.
    """
    count = len(sample["target"])
    even = count - count % 2
    parts = []
    if even:
        parts.append(transform({key: value[:even] for key, value in sample.items()}))
    if even < count:
        last = {key: value[even:] for key, value in sample.items()}
        last["target"] = mixup_target(
            last["target"], transform.num_classes, lam=1.0, smoothing=transform.label_smoothing
        )
        parts.append(last)
    return {**sample, **{key: torch.cat([part[key] for part in parts]) for key in ("input", "target")}}
