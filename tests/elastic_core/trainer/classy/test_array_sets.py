from __future__ import annotations

import gzip
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import build_dataset
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.textures import TexturesDataset, load_textures
from tests.elastic_core.trainer.classy.conftest import make_trainee, small_config


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    head = b"\0\0\x08" + bytes([array.ndim]) + b"".join(side.to_bytes(4, "big") for side in array.shape)
    data = head + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(root: Path, suffix: str = ".gz") -> Path:
    for stem, count in (("train", 5), ("t10k", 3)):
        images = np.arange(count * 784, dtype=np.uint8).reshape(count, 28, 28)
        write_idx(root / f"{stem}-images-idx3-ubyte{suffix}", images)
        write_idx(root / f"{stem}-labels-idx1-ubyte{suffix}", np.arange(count, dtype=np.uint8))
    return root


def write_cifar(root: Path, *, protocol: int = 2, kind: int = 10) -> Path:
    """Write CIFAR's layout with two images a batch; image i of a batch is all i * 9."""
    place = root / ("cifar-10-batches-py" if kind == 10 else "cifar-100-python")
    place.mkdir(parents=True)
    rows = np.repeat(np.array([[0], [9]], dtype=np.uint8), 3072, axis=1)
    stems = [*(f"data_batch_{n}" for n in range(1, 6)), "test_batch"] if kind == 10 else ["train", "test"]
    key = "labels" if kind == 10 else "fine_labels"
    for stem in stems:
        (place / stem).write_bytes(pickle.dumps({"data": rows, key: [7, 1]}, protocol=protocol))
    return root


def section(name: str, root: Path, split: str = "train", **keys: Any) -> dict[str, Any]:
    common = {"batchsize_per_replica": 1, "use_shuffle": False}
    return {"name": name, "root": str(root), "split": split, **common, **keys}


@pytest.mark.parametrize(("place", "suffix"), [(".", ".gz"), ("FashionMNIST/raw", "")])
def test_fashion_mnist_is_read_where_debian_and_torchvision_put_it(
    tmp_path: Path, place: str, suffix: str
) -> None:
    write_mnist(tmp_path / place, suffix)
    train = build_dataset(section("fashion_mnist", tmp_path))
    test = build_dataset(section("fashion_mnist", tmp_path, "test"))
    assert (len(train), len(test)) == (5, 3)
    assert train[4]["target"] == 4
    assert train[0]["input"].shape == (1, 28, 28)
    assert train[0]["input"].flatten()[:3].tolist() == pytest.approx([0, 1 / 255, 2 / 255])
    assert train.classes[9] == "boot"


@pytest.mark.parametrize("name", ["cifar10", "classy_cifar10"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_cifar_is_read_without_a_checksum_and_without_a_download(
    tmp_path: Path, name: str, protocol: int
) -> None:
    write_cifar(tmp_path, protocol=protocol)
    train = build_dataset(section(name, tmp_path))
    assert len(train) == 10
    assert [train[index]["target"] for index in range(4)] == [7, 1, 7, 1]
    assert train[1]["input"].shape == (3, 32, 32)
    assert train[1]["input"].unique().tolist() == pytest.approx([9 / 255])
    assert len(build_dataset(section(name, tmp_path, "test"))) == 2


def test_cifar_100_has_its_fine_labels_and_classy_visions_transforms(tmp_path: Path) -> None:
    write_cifar(tmp_path, kind=100)
    transforms = [{"name": "generic_image_transform", "transforms": [{"name": "Pad", "padding": 2}]}]
    transforms[0]["transforms"].append({"name": "ToTensor"})  # type: ignore[attr-defined]
    data = build_dataset(section("classy_cifar100", tmp_path, transforms=transforms))
    assert data[0]["target"] == 7
    assert data[0]["input"].shape == (3, 36, 36)


def test_a_pickle_that_names_code_is_refused_and_not_run(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(tmp_path / "ran"),)

    write_cifar(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps({"data": Evil()}))
    with pytest.raises(RefusedInput, match=r"cannot be read: UnpicklingError: it names posix\.mkdir"):
        build_dataset(section("cifar10", tmp_path))
    assert not (tmp_path / "ran").exists()


def test_missing_and_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match=r"holds no data_batch_1 .* nothing is downloaded"):
        build_dataset(section("cifar10", tmp_path))
    with pytest.raises(RefusedInput, match=r"split is 'val': use"):
        build_dataset(section("cifar10", tmp_path, "val"))
    write_mnist(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte.gz").write_bytes(gzip.compress(b"html"))
    with pytest.raises(RefusedInput, match=r"train-labels-idx1-ubyte\.gz is no IDX file"):
        build_dataset(section("mnist", tmp_path))
    write_idx(tmp_path / "train-labels-idx1-ubyte.gz", np.zeros(2, dtype=np.uint8))
    with pytest.raises(RefusedInput, match="5 images and 2 labels"):
        build_dataset(section("mnist", tmp_path))


# ---- what ships ------------------------------------------------------------------------------


def test_textures_share_no_pixel_between_train_and_test() -> None:
    (train, labels), (test, held_out) = load_textures("train"), load_textures("test")
    assert (train.shape, test.shape) == ((2139, 3, 16, 16), (651, 3, 16, 16))
    assert labels.bincount().tolist() == [713] * 3
    assert held_out.bincount().tolist() == [217] * 3
    assert abs(train.mean()) < 0.1
    assert 0.8 < train.std() < 1.2
    rows = {tuple(patch.flatten().tolist()) for patch in train[:, 0]}
    assert not any(tuple(patch.flatten().tolist()) in rows for patch in test[:, 0])


def test_textures_can_be_learned() -> None:
    config = small_config(num_epochs=3)
    for split in ("train", "test"):
        config["dataset"][split] |= {"name": "textures", "num_samples": None}
    config["model"] = {
        "name": "mlp",
        "input_dim": 768,
        "output_dim": len(TexturesDataset.classes),
        "hidden_dims": [64],
        "use_batchnorm": True,
    }
    config["meters"] = {}
    trainee, alone = make_trainee(config, global_batch=128), SoloReducer()
    while trainee.step < trainee.total_steps:
        trainee.train_step(alone)
    assert trainee.evaluate(alone)["test_accuracy"] > 0.6, "a third is chance"
