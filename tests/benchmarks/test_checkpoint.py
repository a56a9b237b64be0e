from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoint import make_state, measure_ours, measure_torch, rows_of
from elastic_core.trainer.snapshot import take_apart


def test_the_state_has_the_size_that_was_asked_for() -> None:
    size = sum(tensor.nbytes for tensor in take_apart(make_state(2)).tensors)
    assert 1.9e6 < size <= 2e6


def test_each_part_of_a_checkpoint_is_measured_as_often_as_was_asked_for(tmp_path: Path) -> None:
    state = make_state(0.5)
    ours = measure_ours(state, tmp_path / "ours", 2)
    assert {case for case in ours if not case.startswith("stall:")} == {
        "stall", "save", "load", "snapshot that outlives the worker",
    }  # fmt: skip
    assert {len(seconds) for seconds in ours.values()} == {2}
    assert all(begin < end for begin, end in zip(ours["stall"], ours["save"], strict=True))
    (tmp_path / "torch").mkdir()
    theirs = measure_torch(state, tmp_path / "torch", 1)
    rows = {row.case: row for row in rows_of("torch.save", theirs, 0.5)}
    assert rows["stall, 0.5 MB"].median == rows["save, 0.5 MB"].median == 1000 * theirs["save"][0]
