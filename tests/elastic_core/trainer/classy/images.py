"""A tiny image folder and the config that trains it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image


def picture_config(root: Path, *classes: str) -> dict[str, Any]:
    """Make 12 images a class and split, and return a config that trains them for two epochs."""
    random = np.random.default_rng(0)
    for split in ("train", "test"):
        for name in classes:
            (root / split / name).mkdir(parents=True)
            for number in range(12):
                pixels = random.integers(0, 255, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(root / split / name / f"{number}.png")
    data = {"name": "image_folder", "root": str(root), "num_workers": 0, "batchsize_per_replica": 6}
    data["transforms"] = [{"name": "generic_image_transform", "transforms": [{"name": "ToTensor"}]}]
    head = {"name": "fully_connected", "unique_id": "head", "fork_block": "block0-0", "in_plane": 4}
    return {
        "name": "classification_task",
        "num_epochs": 2,
        "loss": {"name": "CrossEntropyLoss"},
        "dataset": {
            "train": {**data, "split": "train", "use_shuffle": True},
            "test": {**data, "split": "test", "use_shuffle": False},
        },
        "meters": {"accuracy": {"topk": [1]}},
        "model": {
            "name": "resnet",
            "num_blocks": [1],
            "init_planes": 4,
            "basic_layer": True,
            "small_input": True,
            "heads": [{**head, "num_classes": len(classes)}],
        },
        "optimizer": {
            "name": "sgd",
            "param_schedulers": {"lr": {"name": "cosine", "start_value": 0.01, "end_value": 0.001}},
        },
    }
