"""MNIST, Fashion-MNIST, CIFAR-10 and CIFAR-100 from a local directory, in the layouts that they come in.

Nothing is downloaded, for every worker would do so at every start, and no checksum is asked for, so
subsets of one's own in these layouts are welcome. CIFAR's pickles may hold arrays and plain values only.
"""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from torchvision.transforms.functional import to_tensor

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import DATASET_REGISTRY, ClassyDataset, register_dataset
from elastic_core.trainer.classy.transforms import sample_transform

Split = Literal["train", "test"]
Array = npt.NDArray[np.uint8]

_IDX: Final = {"train": "train", "test": "t10k"}
_IDX_PLACES: Final = (".", "raw", "FashionMNIST/raw", "MNIST/raw")
_CIFAR_SIDE: Final = 32
_CLOTHES: Final = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "boot",
)


@dataclass(frozen=True, slots=True)
class Images:
    """A split in memory.

    Attributes:
        pixels: (n, height, width) or (n, height, width, 3).
        labels: (n,), from 0.
        classes: Their names.
    """

    pixels: Array
    labels: npt.NDArray[np.int64]
    classes: tuple[str, ...]


class _Samples:
    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images.labels)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {
            "input": Image.fromarray(self._images.pixels[index]),
            "target": int(self._images.labels[index]),
        }


def _as_tensor(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "input": to_tensor(sample["input"])}


class _ArraySet(ClassyDataset):  # type: ignore[misc]  # Classy Vision has no types
    """Keys: `root`, `split` and what every data set has; without transforms, pixels from 0 to 1."""

    in_memory = True
    read: Callable[[Path, Split], Images]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> _ArraySet:
        """Read a split.

        Raises:
            RefusedInput: The files are not there, or are no such data set.
        """
        split, root = config.get("split"), config.get("root")
        if split not in ("train", "test"):
            raise RefusedInput([f'split is {split!r}: use "train" or "test"'])
        if not isinstance(root, str):
            raise RefusedInput([f"root is {root!r}: give the directory of the data set"])
        try:
            images = cls.read(Path(root), split)
        except RefusedInput:
            raise
        except (OSError, ValueError, KeyError, pickle.UnpicklingError, EOFError) as error:
            raise RefusedInput([f"root {root!r} cannot be read: {type(error).__name__}: {error}"]) from error
        transforms, batch, shuffle, num_samples = cls.parse_config(config)
        transform = sample_transform(transforms) if transforms else _as_tensor
        dataset = cls(_Samples(images), batch, bool(shuffle), transform, num_samples)
        dataset.classes = images.classes
        return dataset


# ---- MNIST and Fashion-MNIST -----------------------------------------------------------------


def _read_idx_set(root: Path, split: Split, classes: tuple[str, ...]) -> Images:
    stem = _IDX[split]
    pixels = _read_idx(_find(root, _IDX_PLACES, f"{stem}-images-idx3-ubyte", f"{stem}-images.idx3-ubyte"))
    labels = _read_idx(_find(root, _IDX_PLACES, f"{stem}-labels-idx1-ubyte", f"{stem}-labels.idx1-ubyte"))
    return _checked(pixels, labels, classes)


def _read_idx(path: Path) -> Array:
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if len(data) < 4 or data[:3] != b"\0\0\x08":
        raise ValueError(f"{path.name} is no IDX file of bytes")
    dimensions = data[3]
    shape = [int.from_bytes(data[4 + 4 * axis : 8 + 4 * axis], "big") for axis in range(dimensions)]
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


@register_dataset("mnist")
class MnistDataset(_ArraySet):
    """`{"name": "mnist", "root": …, "split": …}`: IDX files, as they are or with gzip."""

    @staticmethod
    def read(root: Path, split: Split) -> Images:
        """Read a split."""
        return _read_idx_set(root, split, tuple("0123456789"))


@register_dataset("fashion_mnist")
class FashionMnistDataset(_ArraySet):
    """`{"name": "fashion_mnist", "root": …, "split": …}`: IDX files, as they are or with gzip."""

    @staticmethod
    def read(root: Path, split: Split) -> Images:
        """Read a split."""
        return _read_idx_set(root, split, _CLOTHES)


# ---- CIFAR -----------------------------------------------------------------------------------


class _PlainUnpickler(pickle.Unpickler):
    """Arrays and plain values: a data set has no business to name anything else."""

    _ALLOWED: Final = {
        ("_reconstruct", "multiarray"): np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
        ("ndarray", "numpy"): np.ndarray,
        ("dtype", "numpy"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Return one of the few things that arrays are made of."""
        try:
            return self._ALLOWED[name, module.rpartition(".")[2]]
        except KeyError:
            if (module, name) == ("_codecs", "encode"):
                return str.encode
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no data set needs") from None


def _unpickle(path: Path) -> dict[str, Any]:
    with path.open("rb") as stream:
        data = _PlainUnpickler(stream, encoding="latin1").load()
    if not isinstance(data, dict):
        raise ValueError(f"{path.name} holds no dict")
    return data


def _read_cifar(root: Path, split: Split, kind: Literal[10, 100]) -> Images:
    places = (".", f"cifar-{kind}-batches-py", f"cifar-{kind}-python")
    stems = [split] if kind == 100 else _batches(split)
    key = "fine_labels" if kind == 100 else "labels"
    parts = [_unpickle(_find(root, places, stem)) for stem in stems]
    rows = np.concatenate([np.asarray(part["data"], np.uint8) for part in parts])
    labels = np.concatenate([np.asarray(part[key]) for part in parts])
    names = _cifar_names(root, places, kind)
    pixels = rows.reshape(-1, 3, _CIFAR_SIDE, _CIFAR_SIDE).transpose(0, 2, 3, 1)
    return _checked(np.ascontiguousarray(pixels), labels, names)


def _batches(split: Split) -> list[str]:
    return ["test_batch"] if split == "test" else [f"data_batch_{number}" for number in range(1, 6)]


def _cifar_names(root: Path, places: tuple[str, ...], kind: Literal[10, 100]) -> tuple[str, ...]:
    stem, key = ("meta", "fine_label_names") if kind == 100 else ("batches.meta", "label_names")
    try:
        return tuple(_unpickle(_find(root, places, stem))[key])
    except RefusedInput:
        return tuple(str(label) for label in range(kind))  # the names are a nicety


@register_dataset("cifar10")
class Cifar10Dataset(_ArraySet):
    """`{"name": "cifar10", "root": …, "split": …}`: the Python version's batches."""

    @staticmethod
    def read(root: Path, split: Split) -> Images:
        """Read a split."""
        return _read_cifar(root, split, 10)


@register_dataset("cifar100")
class Cifar100Dataset(_ArraySet):
    """`{"name": "cifar100", "root": …, "split": …}`: the Python version's files, fine labels."""

    @staticmethod
    def read(root: Path, split: Split) -> Images:
        """Read a split."""
        return _read_cifar(root, split, 100)


DATASET_REGISTRY["classy_cifar10"] = Cifar10Dataset
DATASET_REGISTRY["classy_cifar100"] = Cifar100Dataset


# ---- both ------------------------------------------------------------------------------------


def _find(root: Path, places: tuple[str, ...], *names: str) -> Path:
    """Return the first file of some names, plain or with gzip, in some directories below a root.

    Raises:
        RefusedInput: There is none.
    """
    candidates = [root / place / f"{name}{end}" for place in places for name in names for end in ("", ".gz")]
    for path in candidates:
        if path.is_file():
            return path
    raise RefusedInput(
        [
            f"root {str(root)!r} holds no {names[0]} (looked in {', '.join(places)}); unpack the data set "
            "there: nothing is downloaded, because every worker would"
        ]
    )


def _checked(pixels: Array, labels: npt.NDArray[Any], classes: tuple[str, ...]) -> Images:
    if len(pixels) != len(labels):
        raise ValueError(f"{len(pixels)} images and {len(labels)} labels")
    return Images(pixels, labels.astype(np.int64), classes)
