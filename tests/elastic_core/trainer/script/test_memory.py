from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from elastic_core.trainer.script import memory
from elastic_core.trainer.script.memory import Mark, MemorySnapshots, Pace


def mark(step: int) -> Mark:
    return Mark(step=step, attempt=1, generation=2, wall_time=float(step))


def state(value: float, size: int = 3) -> dict[str, Any]:
    return {"weights": torch.full((size,), value), "steps": {0: torch.tensor(7)}, "name": "x"}


def descriptors() -> list[int]:
    return [os.memfd_create("test") for _ in range(2)]


def test_another_process_finds_the_newest_snapshot_by_the_descriptors_alone() -> None:
    files = descriptors()
    writer = MemorySnapshots(files)
    for step in range(5):
        writer.keep(state(float(step)), mark(step))
    found = MemorySnapshots.from_text(",".join(map(str, files))).newest()
    assert found is not None
    assert found[0] == mark(4)
    assert found[1]["weights"].tolist() == [4.0, 4.0, 4.0]
    assert (found[1]["steps"], found[1]["name"]) == ({0: torch.tensor(7)}, "x")


def test_a_copy_that_was_cut_off_leaves_the_snapshot_before(monkeypatch: pytest.MonkeyPatch) -> None:
    files = descriptors()
    writer = MemorySnapshots(files)
    writer.keep(state(1.0), mark(1))
    writer.keep(state(2.0), mark(2))

    class Killed(Exception):
        pass

    def cut(*_: object) -> None:
        raise Killed

    monkeypatch.setattr(memory.Layout, "views", cut)
    with pytest.raises(Killed):
        writer.keep(state(3.0), mark(3))
    monkeypatch.undo()
    found = MemorySnapshots(files).newest()
    assert found is not None
    assert (found[0].step, found[1]["weights"][0].item()) == (2, 2.0)


def test_who_goes_on_from_a_snapshot_does_not_overwrite_the_newest_one_first() -> None:
    files = descriptors()
    writer = MemorySnapshots(files)
    writer.keep(state(1.0), mark(1))
    writer.keep(state(2.0), mark(2))
    successor = MemorySnapshots(files)
    assert successor.newest() is not None
    successor.keep(state(3.0), mark(3))
    os.pwrite(files[1], bytes(8), 0)  # the copy of step 3 was not whole
    found = MemorySnapshots(files).newest()
    assert found is not None
    assert found[0].step == 2


def test_a_state_that_grows_finds_room() -> None:
    files = descriptors()
    writer = MemorySnapshots(files)
    for step, size in enumerate([1, 1000, 10, 5000]):
        writer.keep(state(float(step), size), mark(step))
    found = MemorySnapshots(files).newest()
    assert found is not None
    assert found[1]["weights"].shape == (5000,)


def test_memory_never_written_to_holds_nothing_and_no_memory_keeps_nothing() -> None:
    assert MemorySnapshots(descriptors()).newest() is None
    nothing = MemorySnapshots.from_text("")
    nothing.keep(state(1.0), mark(1))
    assert nothing.newest() is None


def test_a_restored_state_is_a_copy_that_later_snapshots_do_not_touch() -> None:
    writer = MemorySnapshots(descriptors())
    writer.keep(state(1.0), mark(1))
    found = writer.newest()
    assert found is not None
    for step in (2, 3):
        writer.keep(state(float(step)), mark(step))
    assert found[1]["weights"].tolist() == [1.0, 1.0, 1.0]


def test_what_is_not_plain_is_refused_by_its_place() -> None:
    with pytest.raises(TypeError, match=r"state\.parts\.schedule is of type"):
        MemorySnapshots(descriptors()).keep({"parts": {"schedule": lambda: None}}, mark(1))


@pytest.mark.parametrize(("copy_s", "every"), [(0.0, 1), (0.001, 1), (0.005, 1), (0.006, 2), (0.1, 20)])
def test_snapshots_cost_a_twentieth_of_the_steps_at_most(copy_s: float, every: int) -> None:
    pace = Pace()
    pace.stepped(0.1)
    pace.copied(copy_s)
    assert pace.every == every
