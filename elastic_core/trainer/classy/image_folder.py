"""Images in one directory a class: the layout that every image data set can be brought into.

    root/train/cat/1.jpg       or, without split directories,       root/cat/1.jpg
    root/test/cat/2.jpg        (or root/val, as ImageNet has it)

The listing is made once and kept as a manifest, for a network file system answers slowly and
every rank asks at every start. Names that start with a dot are ignored. Ids are positions
in the sorted manifest, so they mean the same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from PIL import Image

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import DATASET_REGISTRY, ClassyDataset, register_dataset
from elastic_core.trainer.classy.transforms import sample_transform

EXTENSIONS: Final = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff", ".webp")
MANIFEST: Final = ".elastic-manifest.json"

_LOG: Final = logging.getLogger(__name__)
_BUCKETS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The images of a root, sorted.

    Attributes:
        classes: Class names, sorted; a label is a position in them.
        files: Paths relative to the root.
        labels: One for each file.
    """

    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: tuple[int, ...]

    def select(self, positions: Iterator[int]) -> Manifest:
        """Return the manifest with some of its files; labels keep their meaning."""
        chosen = list(positions)
        return Manifest(
            classes=self.classes,
            files=tuple(self.files[position] for position in chosen),
            labels=tuple(self.labels[position] for position in chosen),
        )


def read_manifest(root: Path) -> Manifest:
    """Return the kept manifest of a directory if it is newer than all class directories, else list anew.

    Raises:
        RefusedInput: There is no such directory, or no image in it.
    """
    kept = root / MANIFEST
    stamps = _stamps(root)
    try:
        data = json.loads(kept.read_text())
        if data["stamps"] == stamps:
            return Manifest(
                classes=tuple(data["classes"]), files=tuple(data["files"]), labels=tuple(data["labels"])
            )
    except (OSError, ValueError, KeyError):
        pass  # none yet, or damaged: the listing below is the truth
    manifest = _list(root)
    _keep(kept, {"stamps": stamps, **_as_json(manifest)})
    return manifest


def split_of(file: str, fraction: float) -> Literal["train", "test"]:
    """Return the split of a file: a function of its name alone, so that new images move no old ones."""
    bucket = int.from_bytes(hashlib.blake2b(file.encode(), digest_size=8).digest(), "big") % _BUCKETS
    return "test" if bucket < fraction * _BUCKETS else "train"


def _stamps(root: Path) -> dict[str, int]:
    """Return the modification time of each class directory: it changes when files come or go."""
    try:
        entries = sorted(_visible(root))
    except OSError as error:
        raise RefusedInput([f"image_folder: root {str(root)!r}: {error.strerror}"]) from error
    return {name: (root / name).stat().st_mtime_ns for name in entries if (root / name).is_dir()}


def _visible(directory: Path) -> Iterator[str]:
    return (entry.name for entry in directory.iterdir() if not entry.name.startswith("."))


def _list(root: Path) -> Manifest:
    classes = sorted(_stamps(root))
    pairs = [(file, label) for label, name in enumerate(classes) for file in sorted(_images(root, name))]
    if not pairs:
        raise RefusedInput(
            [
                f"image_folder: root {str(root)!r} holds no images in class directories; expected "
                f"{root}/<class>/<image> with one of {', '.join(EXTENSIONS)}"
            ]
        )
    return Manifest(
        classes=tuple(classes),
        files=tuple(file for file, _ in pairs),
        labels=tuple(label for _, label in pairs),
    )


def _images(root: Path, name: str) -> Iterator[str]:
    for entry in _visible(root / name):
        if (root / name / entry).is_dir():
            raise RefusedInput(
                [
                    f"image_folder: {str(root / name / entry)!r} is a directory within class {name!r}: "
                    "put the images directly into their class directory"
                ]
            )
        if entry.lower().endswith(EXTENSIONS):
            yield f"{name}/{entry}"


def _as_json(manifest: Manifest) -> dict[str, Any]:
    return {"classes": manifest.classes, "files": manifest.files, "labels": manifest.labels}


def _keep(path: Path, data: dict[str, Any]) -> None:
    """Write the manifest for the next start; a read-only data set simply has none."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        new.write_text(json.dumps(data))
        new.replace(path)
    except OSError as error:
        _LOG.info("the listing of %s is not kept: %s", path.parent, error.strerror)


class _Images:
    """Reads images by position in a manifest."""

    def __init__(self, root: Path, manifest: Manifest, on_bad_image: Literal["error", "skip"]) -> None:
        self._root = root
        self._on_bad_image = on_bad_image
        # one array each: a list of a million strings would be copied page by page into every forked process
        self._files = np.array(manifest.files)
        self._labels = np.array(manifest.labels)
        self._told: set[int] = set()

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any] | None:
        """Return a sample, None for one that is left out because it cannot be read."""
        path = self._root / str(self._files[index])
        try:
            with Image.open(path) as image:
                return {"input": image.convert("RGB"), "target": int(self._labels[index])}
        except (OSError, SyntaxError) as error:
            if self._on_bad_image == "error":
                raise ValueError(
                    f"image {str(path)!r} cannot be read ({error}): remove it, or set "
                    '"on_bad_image": "skip" to train without it'
                ) from error
            if index not in self._told:
                self._told.add(index)
                _LOG.warning("image %s cannot be read (%s): left out", path, error)
            return None


@register_dataset("image_folder")
class ImageFolderDataset(ClassyDataset):  # type: ignore[misc]  # Classy Vision has no types
    """`{"name": "image_folder", "root": …, "split": "train" | "test", …}`.

    Further keys: `test_fraction` (where root has no split directories, the part of the images
    that is held out, by hash of their names; default 0.1), `on_bad_image` ("error" or "skip").
    """

    in_memory = False

    def __init__(self, root: Path, manifest: Manifest, config: dict[str, Any]) -> None:
        transform_config, batch, shuffle, num_samples = self.parse_config(config)
        images = _Images(root, manifest, config.get("on_bad_image", "error"))
        transform = sample_transform(transform_config) if transform_config else None
        super().__init__(images, batch, bool(shuffle), transform, num_samples)
        self.classes = manifest.classes

    def __getitem__(self, index: int) -> Any:
        """Return a sample, None for one that is left out because it cannot be read."""
        sample = self.dataset[index]
        return sample if sample is None or self.transform is None else self.transform(sample)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImageFolderDataset:
        """Build a split from its section of a config.

        Raises:
            RefusedInput: A key has a value that is not allowed, or there are no images.
        """
        split, policy = config.get("split"), config.get("on_bad_image", "error")
        if split not in ("train", "test"):
            raise RefusedInput([f'image_folder: split is {split!r}: use "train" or "test"'])
        if policy not in ("error", "skip"):
            raise RefusedInput([f'image_folder: on_bad_image is {policy!r}: use "error" or "skip"'])
        root, fraction = Path(config["root"]), float(config.get("test_fraction", 0.1))
        if (root / "train").is_dir():
            return cls(*_split_directory(root, split), config)
        whole = read_manifest(root)
        part = whole.select(
            position for position, file in enumerate(whole.files) if split_of(file, fraction) == split
        )
        return cls(root, part, config)


class ImagePathDataset(ImageFolderDataset):
    """Classy Vision's `image_path` on a directory of class directories: the same keys, the same labels.

    The original looks at whichever entry the file system lists first: one stray file, and the whole
    tree is taken for images without labels.
    """

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> ImagePathDataset:
        """Build the data set of a section.

        Raises:
            RefusedInput: There are no images in class directories.
        """
        root = Path(config["image_folder"])
        return cls(root, read_manifest(root), config)


DATASET_REGISTRY["image_path"] = ImagePathDataset


def _split_directory(root: Path, split: str) -> tuple[Path, Manifest]:
    """Return the directory of a split and its manifest, with the labels of the training split."""
    place = root / "val" if split == "test" and not (root / "test").is_dir() else root / split
    train, manifest = read_manifest(root / "train"), read_manifest(place)
    unknown = sorted(set(manifest.classes) - set(train.classes))
    if unknown:
        raise RefusedInput(
            [f"image_folder: {str(place)!r} has classes that train has not: {', '.join(unknown[:5])}"]
        )
    label = [train.classes.index(name) for name in manifest.classes]
    return place, replace(
        manifest, classes=train.classes, labels=tuple(label[old] for old in manifest.labels)
    )
