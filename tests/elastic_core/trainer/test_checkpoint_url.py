"""What holds of a directory of checkpoints holds behind a URL, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import fsspec
import pytest
from structlog.testing import capture_logs

from elastic_core.clock import SystemClock
from elastic_core.errors import RefusedInput
from elastic_core.trainer.checkpoint import CheckpointDirectory, Checkpoints, StaleGeneration, Token
from elastic_core.trainer.checkpoint_url import CheckpointUrl, open_checkpoints
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from tests.elastic_core.trainer.test_checkpoint import manifest_at, state_at


@pytest.fixture(params=["memory", "file"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"memory://{uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/run"


def write(checkpoints: Checkpoints, *steps: int, generation: int = 1) -> None:
    checkpoints.claim(Token(1, generation), "a")
    for step in steps:
        checkpoints.write(state_at(step), manifest_at(step, generation=generation))


def newest_step(checkpoints: Checkpoints) -> int:
    found = checkpoints.newest()
    assert found is not None
    assert found.state["weights"][0].item() == found.state["step"] == found.manifest.step
    return found.manifest.step


def files_of(url: str) -> tuple[Any, str]:
    files, root = fsspec.core.url_to_fs(url)
    return files, root


def names(url: str) -> list[str]:
    files, root = files_of(url)
    return sorted(path.rpartition("/")[2] for path in files.ls(root, detail=False))


def test_a_directory_is_a_directory_and_a_url_a_file_system(tmp_path: Path) -> None:
    assert isinstance(open_checkpoints(tmp_path), CheckpointDirectory)
    assert isinstance(open_checkpoints("memory://x"), CheckpointUrl)


def test_a_scheme_that_nothing_knows_is_refused_by_its_field() -> None:
    with pytest.raises(RefusedInput, match=r"checkpoint.directory: 'nosuch://x' cannot be opened"):
        open_checkpoints("nosuch://x")


def test_the_newest_is_read_back_and_the_oldest_are_removed(url: str) -> None:
    checkpoints = open_checkpoints(url, keep=2)
    assert checkpoints.newest() is None
    write(checkpoints, 10, 20, 30)
    assert newest_step(open_checkpoints(url)) == 30
    assert names(url) == ["fence", "step-00000020-a1-g1", "step-00000030-a1-g1"]
    assert open_checkpoints(url).newest_attempt() == 1


def test_a_write_that_was_cut_off_is_passed_over_and_removed_by_the_next_claim(url: str) -> None:
    write(open_checkpoints(url), 10)
    files, root = files_of(url)
    files.makedirs(f"{root}/step-00000020-a1-g1", exist_ok=True)
    files.pipe_file(f"{root}/step-00000020-a1-g1/state.pt", b"half")
    with capture_logs() as logs:
        assert newest_step(open_checkpoints(url)) == 10
    assert logs == []
    open_checkpoints(url).claim(Token(1, 2), "b")
    assert not files.exists(f"{root}/step-00000020-a1-g1/state.pt")


def test_a_damaged_one_is_named_kept_aside_and_an_older_one_used(url: str) -> None:
    write(open_checkpoints(url), 10, 20)
    files, root = files_of(url)
    path = f"{root}/step-00000020-a1-g1/state.pt"
    data = bytearray(files.cat_file(path))
    data[len(data) // 2] ^= 1
    files.pipe_file(path, bytes(data))
    with capture_logs() as logs:
        assert newest_step(open_checkpoints(url)) == 10
    assert ["the SHA-256 of state.pt" in line["why"] for line in logs] == [True]
    assert "damaged-step-00000020-a1-g1" in names(url)


@pytest.mark.case("E09")
def test_a_stale_writer_is_refused_and_leaves_nothing_that_is_read(url: str) -> None:
    old, new = open_checkpoints(url), open_checkpoints(url)
    write(old, 10, generation=3)
    new.claim(Token(1, 4), "new")
    with pytest.raises(StaleGeneration, match="generation 4 was claimed"):
        old.write(state_at(20), manifest_at(20, generation=3))
    with pytest.raises(StaleGeneration, match="was claimed by new"):
        open_checkpoints(url).claim(Token(1, 4), "third")
    assert newest_step(new) == 10


@pytest.mark.case("C04")
def test_a_required_place_that_is_missing_is_an_error_with_a_remedy(url: str) -> None:
    with pytest.raises(RefusedInput, match=r"checkpoint\.directory: .* does not exist"):
        open_checkpoints(url).require()


def test_an_upload_that_fails_is_a_visible_failure_and_the_good_one_stays(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = open_checkpoints(url)
    assert isinstance(checkpoints, CheckpointUrl)
    writer = CheckpointWriter(checkpoints, clock=SystemClock())
    writer.claim(Token(1, 1), "a")
    assert writer.save(state_at(10), manifest_at(10), timeout_s=30)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Access Denied")

    monkeypatch.setattr(checkpoints._files, "put_file", refuse)
    with capture_logs() as logs:
        assert not writer.save(state_at(20), manifest_at(20), timeout_s=30)
    assert (writer.failures, "Access Denied" in writer.last_error) == (1, True)
    assert [line["event"] for line in logs] == ["checkpoint not written"]
    monkeypatch.undo()
    assert newest_step(open_checkpoints(url)) == 10
