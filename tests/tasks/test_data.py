"""Equal data are equal wherever they lie; anything else is news."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.quality.data import DataPrint
from tasks import data
from tasks.data import fingerprint


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "data" / name).write_text(name)
    return tmp_path / "data"


def print_of(root: Path, **section: Any) -> DataPrint:
    train = {"name": "image_folder", "root": str(root), "split": "train", **section}
    config = {"dataset": {"train": train, "test": {**train, "split": "test"}}}
    return fingerprint(JobSpec(training=ClassyTraining(config=config)), root.parent / "cache")


def test_files_are_counted_by_folder(root: Path) -> None:
    found = print_of(root)
    assert (found.files, found.size, dict(found.folders)) == (3, 27, {"cat": 2, "dog": 1})


CHANGES: dict[str, Callable[[Path], object]] = {
    "a file more": lambda root: (root / "dog/2.png").write_text("x"),
    "a file less": lambda root: (root / "cat/2.png").unlink(),
    "another name": lambda root: (root / "cat/2.png").rename(root / "cat/3.png"),
    "another class": lambda root: (root / "cat/2.png").rename(root / "dog/2.png"),
    "another content of the same size": lambda root: (root / "cat/2.png").write_text("cat/9.png"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_of_the_data_is_news(root: Path, change: str) -> None:
    before = print_of(root)
    CHANGES[change](root)
    assert print_of(root).digest != before.digest


def test_a_content_that_changed_behind_its_times_is_news(root: Path) -> None:
    before = print_of(root)
    file = root / "cat/2.png"
    stat = file.stat()
    file.write_text("cat/9.png")
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert print_of(root).digest != before.digest


def test_another_place_other_times_and_hidden_files_are_no_news(root: Path) -> None:
    before = print_of(root)
    shutil.copytree(root, root.with_name("moved"))
    (root.with_name("moved") / ".elastic-manifest.json").write_text("{}")
    assert print_of(root.with_name("moved")) == before


def test_how_data_are_fetched_is_no_news_but_which_are_read_is(root: Path) -> None:
    before = print_of(root, num_workers=2, batchsize_per_replica=8)
    assert print_of(root, num_workers=0, batchsize_per_replica=4) == before
    assert print_of(root, test_fraction=0.5).digest != before.digest


def test_a_file_that_did_not_change_is_not_read_again(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    digest = data._digest
    monkeypatch.setattr(data, "_digest", lambda path: read.append(path.name) or digest(path))
    print_of(root)
    (root / "dog/2.png").write_text("x")
    print_of(root)
    # The same root in two sections is one root.
    assert read == ["1.png", "2.png", "1.png", "2.png"]


def test_data_that_come_with_the_program_have_a_fingerprint_without_files() -> None:
    config = {"dataset": {"train": {"name": "digits", "split": "train"}, "test": None}}
    found = fingerprint(JobSpec(training=ClassyTraining(config=config)), Path("unused"))
    assert (found.files, len(found.digest)) == (0, 32)
