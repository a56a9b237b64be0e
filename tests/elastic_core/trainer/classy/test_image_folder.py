from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import build_dataset
from elastic_core.trainer.classy.image_folder import MANIFEST, read_manifest, split_of
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.trainee import ClassyTrainee
from elastic_core.trainer.trainee import StepReport
from tests.elastic_core.trainer.classy.conftest import (
    largest_difference,
    make_trainee,
    small_config,
    snapshot,
)
from tests.elastic_core.trainer.classy.fake_world import FakeWorld


def write_image(path: Path, level: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((20, 24, 3), level, dtype=np.uint8)).save(path)


def write_tree(root: Path, count: int = 6) -> Path:
    """Write `count` images of each of two classes: dark cats, bright dogs."""
    for number in range(count):
        write_image(root / "cat" / f"{number}.png", number)
        write_image(root / "dog" / f"{number}.png", 255 - number)
    return root


def section(root: Path, split: str, **changes: Any) -> dict[str, Any]:
    shape = [{"name": "Resize", "size": [16, 16]}, {"name": "ToTensor"}]
    return {
        "name": "image_folder",
        "root": str(root),
        "split": split,
        "batchsize_per_replica": 4,
        "use_shuffle": split == "train",
        "transforms": shape,
        **changes,
    }


def test_labels_follow_sorted_class_names_and_hidden_entries_are_ignored(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", 2)
    write_tree(tmp_path / "test", 1)
    (tmp_path / "train" / ".DS_Store").touch()
    (tmp_path / "train" / "cat" / "._0.png").touch()
    (tmp_path / "train" / "cat" / "notes.txt").touch()
    dataset = build_dataset(section(tmp_path, "train"))
    assert dataset.classes == ("cat", "dog")
    assert [dataset[index]["target"] for index in range(len(dataset))] == [0, 0, 1, 1]
    assert dataset[3]["input"].shape == (3, 16, 16)
    assert dataset[3]["input"].mean().item() == pytest.approx(254 / 255)
    assert len(build_dataset(section(tmp_path, "test"))) == 2


def test_without_split_directories_a_fixed_part_is_held_out_whatever_is_added(tmp_path: Path) -> None:
    write_tree(tmp_path, 100)
    parts = {split: build_dataset(section(tmp_path, split, test_fraction=0.2)) for split in ("train", "test")}
    assert len(parts["train"]) + len(parts["test"]) == 200
    assert 20 < len(parts["test"]) < 60
    held_out = {f"{name}/{number}.png" for name in ("cat", "dog") for number in range(100)}
    held_out = {file for file in held_out if split_of(file, 0.2) == "test"}
    assert len(held_out) == len(parts["test"])
    write_image(tmp_path / "cat" / "new.png", 0)
    assert sum(len(build_dataset(section(tmp_path, split, test_fraction=0.2))) for split in parts) == 201


def test_the_listing_is_made_once_and_again_when_files_came_or_went(tmp_path: Path) -> None:
    write_tree(tmp_path, 2)
    first = read_manifest(tmp_path)
    kept = json.loads((tmp_path / MANIFEST).read_text())
    kept["files"][0] = "cat/marked.png"
    (tmp_path / MANIFEST).write_text(json.dumps(kept))
    assert read_manifest(tmp_path).files[0] == "cat/marked.png", "the kept one was not used"
    (tmp_path / "cat" / "0.png").unlink()
    assert read_manifest(tmp_path).files == first.files[1:]
    (tmp_path / MANIFEST).write_text("{ damaged")
    assert read_manifest(tmp_path).files == first.files[1:]


def test_a_damaged_image_is_an_error_with_its_path_or_left_out_and_named_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_tree(tmp_path / "train", 2)
    (tmp_path / "train" / "cat" / "1.png").write_bytes(b"\x89PNG broken")
    strict = build_dataset(section(tmp_path, "train"))
    with pytest.raises(
        ValueError, match=r"image '.*/train/cat/1\.png' cannot be read .* \"on_bad_image\": \"skip\""
    ):
        strict[1]
    lenient = build_dataset(section(tmp_path, "train", on_bad_image="skip"))
    assert [lenient[1], lenient[1], lenient[2]["target"]] == [None, None, 1]
    (line,) = caplog.messages
    assert re.fullmatch(r"image .*/train/cat/1\.png cannot be read \(.*\): left out", line)


def broken_config(root: Path) -> dict[str, Any]:
    """Return a config over 20 training images of which four are broken, a whole shard among them."""
    write_tree(root / "train", 10)
    write_tree(root / "test", 3)
    for number in (0, 2, 4, 5):
        (root / "train" / "dog" / f"{number}.png").write_bytes(b"broken")
    (root / "test" / "cat" / "0.png").write_bytes(b"broken")
    skip = {"on_bad_image": "skip", "num_workers": 0, "use_shuffle": False}
    data = {split: section(root, split, **skip) for split in ("train", "test")}
    return small_config(dataset=data)


def train_broken(config: dict[str, Any], size: int) -> tuple[ClassyTrainee, list[StepReport]]:
    """Train an epoch of 8, 8 and 4 samples on some ranks; return the first rank and its reports."""
    ranks = [make_trainee(config, global_batch=8, shards=4) for _ in range(size)]

    def work(reducer: Any) -> list[StepReport]:
        return [ranks[reducer.rank].train_step(reducer) for _ in range(3)]

    return ranks[0], FakeWorld(size).run(work)[0]


def test_what_is_left_out_does_not_depend_on_the_world_size(tmp_path: Path) -> None:
    config = broken_config(tmp_path)
    alone, reports = train_broken(config, 1)
    assert [report.metrics.get("samples_left_out", 0) for report in reports] == [0, 4, 0]
    assert [report.samples for report in reports] == [8, 8, 4]
    three, _ = train_broken(config, 3)
    assert largest_difference(snapshot(three), snapshot(alone)) < 1e-6


def test_evaluation_counts_only_what_can_be_read(tmp_path: Path) -> None:
    config = broken_config(tmp_path)
    trainee = make_trainee(config, global_batch=8, shards=4)
    accuracy = trainee.evaluate(SoloReducer())["test_accuracy"]
    assert accuracy * 5 == pytest.approx(round(accuracy * 5)), "five of six images can be read"


def test_mistakes_of_a_tree_are_refused_with_the_directory(tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match="No such file"):
        build_dataset(section(tmp_path / "none", "train"))
    (tmp_path / "flat").mkdir()
    write_image(tmp_path / "flat" / "0.png", 0)
    with pytest.raises(
        RefusedInput, match=r"holds no images in class directories; expected .*/flat/<class>/<image>"
    ):
        build_dataset(section(tmp_path / "flat", "train"))
    write_image(tmp_path / "deep" / "cat" / "young" / "0.png", 0)
    with pytest.raises(RefusedInput, match=r"deep/cat/young' is a directory within class 'cat'"):
        build_dataset(section(tmp_path / "deep", "train"))
    write_tree(tmp_path / "odd" / "train", 1)
    write_image(tmp_path / "odd" / "test" / "bird" / "0.png", 0)
    with pytest.raises(RefusedInput, match="has classes that train has not: bird"):
        build_dataset(section(tmp_path / "odd", "test"))
    with pytest.raises(RefusedInput, match="split is 'validation'"):
        build_dataset(section(tmp_path / "odd", "validation"))


def test_a_test_split_without_some_class_keeps_the_labels_of_train(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", 1)
    write_image(tmp_path / "test" / "dog" / "0.png", 255)
    assert build_dataset(section(tmp_path, "test"))[0]["target"] == 1


@pytest.mark.parametrize(
    "transforms",
    [
        [{"name": "Resize", "size": [16, 16]}, {"name": "ToTensor"}],
        [
            {
                "name": "apply_transform_to_key",
                "key": "input",
                "transforms": [{"name": "Resize", "size": [16, 16]}, {"name": "ToTensor"}],
            }
        ],
        [
            {
                "name": "generic_image_transform",
                "transforms": [{"name": "Resize", "size": [16, 16]}, {"name": "ToTensor"}],
            }
        ],
    ],
)
def test_transforms_may_be_written_as_torchvision_or_as_classy_vision_does(
    transforms: list[dict[str, Any]], tmp_path: Path
) -> None:
    write_tree(tmp_path / "train", 1)
    sample = build_dataset(section(tmp_path, "train", transforms=transforms))[1]
    assert sample["target"] == 1
    assert sample["input"].shape == (3, 16, 16)


def test_a_model_learns_from_a_tree(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", 8)
    write_tree(tmp_path / "test", 4)
    config = small_config(
        dataset={split: section(tmp_path, split, num_workers=0) for split in ("train", "test")}
    )
    trainee = make_trainee({**config, "num_epochs": 20}, global_batch=8)
    while trainee.step < trainee.total_steps:
        trainee.train_step(SoloReducer())
    assert trainee.evaluate(SoloReducer())["test_accuracy"] == 1.0


def test_an_image_path_with_stray_files_has_the_labels_that_classy_vision_gives(tmp_path: Path) -> None:
    write_tree(tmp_path, 2)
    (tmp_path / ".DS_Store").touch()
    (tmp_path / "README.txt").touch()
    keys = {**section(tmp_path, "train"), "name": "image_path", "image_folder": str(tmp_path)}
    data = build_dataset(keys)
    assert [data[index]["target"] for index in range(len(data))] == [0, 0, 1, 1]
    assert data[0]["input"].mean() < 0.1 < 0.9 < data[3]["input"].mean()


def test_imagenets_val_directory_is_the_test_split(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", 1)
    write_image(tmp_path / "val" / "dog" / "0.png", 255)
    data = build_dataset(section(tmp_path, "test"))
    assert (len(data), data[0]["target"]) == (1, 1)


class _ToldByProcess:
    """A transform that leaves in each sample which process made it."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {**self._transform(sample), "process": os.getpid()}


class _Half(SoloReducer):
    """Rank 0 of two, as far as the loader can tell."""

    world_size = 2


@pytest.mark.case("V04")
def test_one_loader_process_serves_all_epochs_and_changes_of_membership(tmp_path: Path) -> None:
    write_tree(tmp_path / "train", 32)
    config = small_config(dataset={"train": section(tmp_path, "train"), "test": None})
    trainee = ClassyTrainee(Recipe(config=config, global_batch=16, shards=2, seed=0), cpus=2)
    assert trainee.loader_processes("train") == 1, "of the node's CPUs one trains"
    dataset = trainee.task.datasets["train"]
    dataset.transform = _ToldByProcess(dataset.transform)
    trainee.set_up()
    seen: list[int] = []
    compute = trainee.task.compute_model

    def noting(sample: dict[str, Any]) -> Any:
        seen.extend(sample["process"].tolist())
        return compute(sample)

    trainee.task.compute_model = noting
    for reducer in (
        SoloReducer(),
        _Half(),
        SoloReducer(),
        SoloReducer(),
        SoloReducer(),
        _Half(),
        SoloReducer(),
    ):
        trainee.train_step(reducer)
    assert len(seen) == 5 * 16 + 2 * 8
    assert len(set(seen)) == 1
    assert os.getpid() not in seen
