from __future__ import annotations

import errno
import json
import pickle
import resource
import shutil
import signal
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from elastic_core.clock import SystemClock
from elastic_core.errors import RefusedInput
from elastic_core.testing.sessions import FORKS
from elastic_core.trainer import checkpoint as checkpoint_module
from elastic_core.trainer import checkpoint_writer as writer_module
from elastic_core.trainer.checkpoint import CheckpointDirectory, Checkpoints, Manifest, StaleGeneration, Token
from elastic_core.trainer.checkpoint_writer import CheckpointWriter


def state_at(step: int) -> dict[str, Any]:
    return {"step": step, "weights": torch.full((1000,), float(step)), "names": ["a", None]}


def manifest_at(step: int, *, attempt: int = 1, generation: int = 1) -> Manifest:
    return Manifest(step=step, attempt=attempt, generation=generation)


@pytest.fixture
def directory(tmp_path: Path) -> CheckpointDirectory:
    return CheckpointDirectory(tmp_path / "checkpoints", keep=3)


def write(directory: CheckpointDirectory, *steps: int, attempt: int = 1, generation: int = 1) -> None:
    directory.claim(Token(attempt, generation), "a")
    for step in steps:
        directory.write(state_at(step), manifest_at(step, attempt=attempt, generation=generation))


def names(directory: CheckpointDirectory) -> list[str]:
    return sorted(path.name for path in directory.path.iterdir() if path.name != "fence")


def newest_step(directory: Checkpoints) -> int:
    checkpoint = directory.newest()
    assert checkpoint is not None
    assert checkpoint.state["step"] == checkpoint.manifest.step
    assert torch.equal(checkpoint.state["weights"], state_at(checkpoint.manifest.step)["weights"])
    return checkpoint.manifest.step


# ---- reading ---------------------------------------------------------------------------------


def test_the_newest_is_read_back_as_it_was_written(directory: CheckpointDirectory) -> None:
    write(directory, 10, 20)
    assert newest_step(directory) == 20
    assert names(directory) == ["step-00000010-a1-g1", "step-00000020-a1-g1"]


def test_an_empty_or_missing_directory_has_no_checkpoint(directory: CheckpointDirectory) -> None:
    assert directory.newest() is None
    directory.path.mkdir()
    assert directory.newest() is None


def test_what_the_caller_has_anyway_is_not_read(directory: CheckpointDirectory) -> None:
    write(directory, 10)
    (directory.path / "step-00000010-a1-g1" / "state.pt").write_bytes(b"damaged")
    assert directory.newest(above=10) is None
    assert names(directory) == ["step-00000010-a1-g1"]


def test_checkpoints_of_earlier_attempts_can_be_passed_over(directory: CheckpointDirectory) -> None:
    write(directory, 10, attempt=1)
    assert directory.newest(attempt=2) is None


def cut_state(path: Path) -> None:
    data = (path / "state.pt").read_bytes()
    (path / "state.pt").write_bytes(data[: len(data) // 2])


def empty_state(path: Path) -> None:
    (path / "state.pt").write_bytes(b"")


def flip_bit(path: Path) -> None:
    data = bytearray((path / "state.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (path / "state.pt").write_bytes(data)


def remove_state(path: Path) -> None:
    (path / "state.pt").unlink()


def remove_manifest(path: Path) -> None:
    (path / "manifest.json").unlink()


def cut_manifest(path: Path) -> None:
    (path / "manifest.json").write_text('{"step": 20')


DAMAGES = {
    cut_state: "its manifest says",
    empty_state: "state.pt has 0 bytes",
    flip_bit: "the SHA-256 of state.pt",
    remove_state: "state.pt cannot be read: No such file",
    remove_manifest: "manifest.json cannot be read: No such file",
    cut_manifest: "manifest.json is not a valid Manifest",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_one_is_named_kept_aside_and_an_older_one_used(
    directory: CheckpointDirectory, damage: Any
) -> None:
    write(directory, 10, 20)
    damage(directory.path / "step-00000020-a1-g1")
    with capture_logs() as logs:
        assert newest_step(directory) == 10
        assert newest_step(directory) == 10
    (warning,) = [line for line in logs if line["log_level"] == "warning"]
    assert warning["checkpoint"].endswith("step-00000020-a1-g1")
    assert DAMAGES[damage] in warning["why"]
    assert names(directory) == ["damaged-step-00000020-a1-g1", "step-00000010-a1-g1"]


@pytest.mark.case("C03")
@pytest.mark.parametrize("name", ["step_999", "step-00000999", "step-00000999-a1-g1"])
def test_an_empty_directory_with_the_highest_number_is_not_trusted(
    directory: CheckpointDirectory, name: str
) -> None:
    """C03."""
    write(directory, 500)
    (directory.path / name).mkdir()
    with capture_logs() as logs:
        assert newest_step(directory) == 500
    assert [line["checkpoint"].endswith(name) for line in logs if line["log_level"] == "warning"] == [True]


def test_a_second_damaged_one_of_the_same_name_is_kept_too(directory: CheckpointDirectory) -> None:
    for _ in range(2):
        write(directory, 10)
        cut_state(directory.path / "step-00000010-a1-g1")
        assert directory.newest() is None
    assert names(directory) == ["damaged-step-00000010-a1-g1", "damaged-step-00000010-a1-g1.1"]


class _Touch:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def forge(checkpoint: Path, content: bytes) -> None:
    """Put another pickle into a checkpoint, with a manifest that vouches for it."""
    with zipfile.ZipFile(checkpoint / "state.pt", "w") as archive:
        archive.writestr("state/data.pkl", content)
        archive.writestr("state/version", "3")
        archive.writestr("state/byteorder", "little")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["size"] = (checkpoint / "state.pt").stat().st_size
    manifest["sha256"] = checkpoint_module._sha256(checkpoint / "state.pt")
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.case("X01")
def test_a_pickle_that_runs_code_is_refused_and_the_one_before_used(
    directory: CheckpointDirectory, tmp_path: Path
) -> None:
    """X01."""
    write(directory, 10, 20)
    witness = tmp_path / "ran"
    forge(directory.path / "step-00000020-a1-g1", pickle.dumps({"a": _Touch(witness)}, protocol=2))
    with capture_logs() as logs:
        assert newest_step(directory) == 10
    assert not witness.exists()
    assert "refused: state.pt is not a plain checkpoint" in logs[0]["why"]


NONSENSE = {
    "pops an empty stack": b"\x80\x02.",
    "names a storage by a number": b"\x80\x02K\x01Q.",
    "recalls what it never stored": b"\x80\x02h\x2e.",
    "ends at once": b"",
}


@pytest.mark.parametrize("content", NONSENSE.values(), ids=NONSENSE)
def test_a_state_that_is_no_pickle_is_damage_whatever_torch_raises(
    directory: CheckpointDirectory, content: bytes
) -> None:
    write(directory, 10, 20)
    forge(directory.path / "step-00000020-a1-g1", content)
    with capture_logs() as logs:
        assert newest_step(directory) == 10
    assert logs[0]["kept"] == "damaged-step-00000020-a1-g1"


@pytest.mark.case("C04")
@pytest.mark.parametrize(("exists", "message"), [(False, "does not exist"), (True, "holds no checkpoint")])
def test_a_required_checkpoint_that_is_missing_is_an_error_with_a_remedy(
    directory: CheckpointDirectory, exists: bool, message: str
) -> None:
    """C04."""
    if exists:
        directory.path.mkdir()
    with pytest.raises(RefusedInput, match=f"checkpoint.directory: .*{message}.*resume: auto"):
        directory.require()


# ---- writing ---------------------------------------------------------------------------------


def test_the_oldest_are_removed_and_the_newest_kept(directory: CheckpointDirectory) -> None:
    write(directory, 10, 20, 30, 40, 50)
    assert names(directory) == ["step-00000030-a1-g1", "step-00000040-a1-g1", "step-00000050-a1-g1"]


def test_a_newer_token_comes_before_a_higher_step(directory: CheckpointDirectory) -> None:
    write(directory, 10, 200, generation=3)
    write(directory, 150, generation=4)
    assert newest_step(directory) == 150
    write(directory, 5, attempt=2, generation=1)
    assert newest_step(directory) == 5


@pytest.mark.case("E09")
def test_a_stale_writer_is_refused(directory: CheckpointDirectory) -> None:
    """E09."""
    directory.claim(Token(1, 3), "old")
    directory.write(state_at(10), manifest_at(10, generation=3))
    directory.claim(Token(1, 4), "new")
    with pytest.raises(StaleGeneration, match=r"generation 3 may not write, .* generation 4 was claimed"):
        directory.write(state_at(20), manifest_at(20, generation=3))
    with pytest.raises(StaleGeneration, match="count ELASTIC_ATTEMPT up"):
        directory.claim(Token(1, 2), "older")
    assert names(directory) == ["step-00000010-a1-g3"]


def test_a_writer_that_is_overtaken_while_it_writes_leaves_nothing(
    directory: CheckpointDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory.claim(Token(1, 3), "old")
    save = torch.save

    def save_slowly(*arguments: Any) -> None:
        save(*arguments)
        (directory.path / "fence" / "00001-00000004").write_text("new")

    monkeypatch.setattr(torch, "save", save_slowly)
    with pytest.raises(StaleGeneration):
        directory.write(state_at(20), manifest_at(20, generation=3))
    assert names(directory) == []


def test_two_owners_cannot_claim_the_same_token(directory: CheckpointDirectory) -> None:
    directory.claim(Token(1, 3), "first")
    directory.claim(Token(1, 3), "first")
    with pytest.raises(StaleGeneration, match="was claimed by first"):
        directory.claim(Token(1, 3), "second")


def test_of_many_claims_at_once_the_highest_stands(directory: CheckpointDirectory) -> None:
    refused: list[int] = []

    def claim(generation: int) -> None:
        try:
            CheckpointDirectory(directory.path).claim(Token(1, generation), str(generation))
        except StaleGeneration:
            refused.append(generation)

    threads = [threading.Thread(target=claim, args=(generation,)) for generation in range(1, 17)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 16 not in refused
    for generation in range(1, 16):
        with pytest.raises(StaleGeneration):
            directory.check(Token(1, generation))


def test_a_state_that_is_not_plain_is_refused_before_anything_is_written(
    directory: CheckpointDirectory,
) -> None:
    writer = CheckpointWriter(directory, clock=SystemClock())
    writer.claim(Token(1, 1), "a")
    with pytest.raises(TypeError, match=r"state\.a is of type builtins\.set"):
        writer.begin({"a": {1}}, manifest_at(1))
    assert names(directory) == []


def write_for_ever(path: Path, finished: Connection) -> None:
    directory = CheckpointDirectory(path, keep=1)
    directory.claim(Token(1, 1), "a")
    for step in range(1, 10**6):
        directory.write(state_at(step), manifest_at(step))
        finished.send(step)


@pytest.mark.case("C01")
@pytest.mark.case("C10")
@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_a_whole_checkpoint(directory: CheckpointDirectory) -> None:
    """C01 and C10: keep is 1, so the only good one is at stake at every write."""
    for moment in range(50):
        shutil.rmtree(directory.path, ignore_errors=True)
        receiver, sender = FORKS.Pipe(duplex=False)
        process = FORKS.Process(target=write_for_ever, args=(directory.path, sender), daemon=True)
        process.start()
        sender.close()
        last = receiver.recv()
        threading.Event().wait(moment * 0.0007)  # a write takes some milliseconds
        process.kill()
        process.join()
        while receiver.poll():
            try:
                last = receiver.recv()
            except EOFError:
                break
        assert newest_step(directory) >= last
        assert [name for name in names(directory) if name.startswith("damaged")] == []


# ---- behind the training -----------------------------------------------------------------------


@pytest.fixture
def writer(directory: CheckpointDirectory) -> CheckpointWriter:
    writer = CheckpointWriter(directory, clock=SystemClock())
    writer.claim(Token(1, 1), "a")
    return writer


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writes wait until this event is set."""
    let_go, save = threading.Event(), torch.save

    def save_when_let_go(*arguments: Any) -> None:
        assert let_go.wait(30)
        save(*arguments)

    monkeypatch.setattr(torch, "save", save_when_let_go)
    yield let_go
    let_go.set()


def test_what_is_written_is_the_state_at_the_time_of_the_call(
    writer: CheckpointWriter, held: threading.Event
) -> None:
    state = state_at(10)
    assert writer.begin(state, manifest_at(10))
    state["weights"].zero_()
    held.set()
    assert writer.wait(30)
    assert newest_step(writer.directory) == 10


def test_a_checkpoint_that_is_due_during_a_write_is_skipped_and_counted(
    writer: CheckpointWriter, held: threading.Event
) -> None:
    assert writer.begin(state_at(10), manifest_at(10))
    assert not writer.begin(state_at(20), manifest_at(20))
    held.set()
    assert writer.wait(30)
    assert (writer.written, writer.skipped, writer.failures) == (1, 1, 0)


def test_a_last_save_waits_for_the_write_before_it(writer: CheckpointWriter, held: threading.Event) -> None:
    writer.begin(state_at(10), manifest_at(10))
    threading.Timer(0.05, held.set).start()
    assert writer.save(state_at(20), manifest_at(20), timeout_s=30)
    assert newest_step(writer.directory) == 20


def test_a_save_that_takes_too_long_is_a_counted_failure(
    writer: CheckpointWriter, held: threading.Event
) -> None:
    assert not writer.save(state_at(10), manifest_at(10), timeout_s=0.01)
    assert writer.failures == 1
    held.set()
    writer.wait(30)


def test_a_stale_write_in_the_background_is_raised_to_the_training_once(writer: CheckpointWriter) -> None:
    CheckpointDirectory(Path(writer.directory.location)).claim(Token(1, 2), "b")
    writer.begin(state_at(10), manifest_at(10))
    with pytest.raises(StaleGeneration):
        writer.wait(30)
    assert writer.wait(0)


def test_a_directory_that_is_gone_is_a_visible_failure_and_no_error(writer: CheckpointWriter) -> None:
    path = Path(writer.directory.location)
    path.rename(path.with_name("elsewhere"))
    with capture_logs() as logs:
        assert not writer.save(state_at(10), manifest_at(10), timeout_s=30)
    assert writer.failures == 1
    assert "No such file" in writer.last_error
    assert [line["event"] for line in logs] == ["checkpoint not written"]


@pytest.mark.parametrize("limit", [0, 100, 3000])
def test_a_full_disk_is_a_visible_failure_and_what_was_there_stays(
    directory: CheckpointDirectory, writer: CheckpointWriter, limit: int
) -> None:
    assert writer.save(state_at(10), manifest_at(10), timeout_s=30)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes fail, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with capture_logs():  # the output would meet the limit too
            assert not writer.save(state_at(20), manifest_at(20), timeout_s=30)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert writer.failures == 1
    assert names(directory) == ["step-00000010-a1-g1"]
    assert writer.save(state_at(30), manifest_at(30), timeout_s=30)
    assert writer.last_error == ""


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    place = tmp_path / "mount"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting needs root")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.case("C06")
def test_a_disk_that_fills_up_or_turns_read_only_is_told_with_its_path_and_keeps_the_good_one(
    mount: Path,
) -> None:
    directory = CheckpointDirectory(mount / "checkpoints", keep=1)
    writer = CheckpointWriter(directory, clock=SystemClock())
    writer.claim(Token(1, 1), "a")
    assert writer.save(state_at(10), manifest_at(10), timeout_s=30)
    large = {**state_at(20), "more": torch.zeros(300_000)}
    with capture_logs() as logs:
        assert not writer.save(large, manifest_at(20), timeout_s=30)
    assert (writer.failures, logs[0]["event"]) == (1, "checkpoint not written")
    assert logs[0]["directory"] == str(mount / "checkpoints")
    assert names(directory) == ["step-00000010-a1-g1"]
    subprocess.run(["mount", "-o", "remount,ro", str(mount)], check=True)
    with capture_logs() as logs:
        assert not writer.save(state_at(30), manifest_at(30), timeout_s=30)
    assert (writer.failures, "Read-only file system" in writer.last_error) == (2, True)
    subprocess.run(["mount", "-o", "remount,rw", str(mount)], check=True)
    assert newest_step(directory) == 10
    assert writer.save(state_at(40), manifest_at(40), timeout_s=30)
    assert writer.last_error == ""


@pytest.mark.case("C12")
def test_a_mount_that_was_replaced_under_the_run_is_tried_again_and_training_does_not_wait(
    writer: CheckpointWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [OSError(errno.ESTALE, "Stale file handle", str(writer.directory.location))]
    write = CheckpointDirectory.write

    def write_on_the_new_mount(directory: CheckpointDirectory, *arguments: Any) -> str:
        if errors:
            raise errors.pop()
        return write(directory, *arguments)

    monkeypatch.setattr(CheckpointDirectory, "write", write_on_the_new_mount)
    with capture_logs() as logs:
        assert writer.begin(state_at(10), manifest_at(10))
        assert writer.stall_s < 0.2, "the pause is not the training's"
        assert writer.wait(30)
    assert [line["event"] for line in logs] == ["checkpoint tried again", "checkpoint written"]
    assert logs[0]["directory"] == writer.directory.location
    assert (writer.written, writer.failures) == (1, 0)


@pytest.mark.case("C11")
def test_a_directory_that_is_not_the_one_of_rank_zero_is_refused_and_the_same_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "_LOOK_AGAIN_S", (0.01,))
    writers = [
        CheckpointWriter(CheckpointDirectory(tmp_path / name), clock=SystemClock())
        for name in ("shared", "shared", "own")
    ]
    assert writers[0].claim(Token(1, 4), "a")
    writers[1].check_shared(Token(1, 4))
    with pytest.raises(RefusedInput, match=r"own' on this node is not the one that rank 0 writes to"):
        writers[2].check_shared(Token(1, 4))
    assert writers[0].claim(Token(1, 5), "b"), "which removes the older claim"
    writers[1].check_shared(Token(1, 4))


def test_a_file_system_that_cannot_be_claimed_is_a_visible_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = CheckpointWriter(CheckpointDirectory(tmp_path / "file"), clock=SystemClock())
    writer.claim(Token(1, 1), "a")
    assert writer.failures == 1
    assert "cannot be claimed" in writer.last_error


def test_training_stands_still_for_a_copy_only(writer: CheckpointWriter, held: threading.Event) -> None:
    state = {"w": [torch.ones(500_000) for _ in range(10)]}
    writer.reserve(state)
    writer.begin(state, manifest_at(1))
    assert 0 < writer.stall_s < 1  # 20 MB: 2 ms on an idle machine; the write itself is held
    assert not list(Path(writer.directory.location).glob("step-*"))
