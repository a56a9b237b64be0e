"""When a group is whole again: decided from the workers' own lines."""

import json
from pathlib import Path

from benchmarks.diary import Note, find_recovery, read_notes, workers


def formed(pid: int, at: float, rank: int, world: int) -> Note:
    return Note(what="formed", at=at, pid=pid, rank=rank, world=world)


def step(pid: int, at: float, rank: int, world: int, number: int) -> Note:
    return Note(what="step", at=at, pid=pid, rank=rank, world=world, step=number)


BEFORE = [
    *(formed(10 + rank, 0.0, rank, 2) for rank in range(2)),
    *(step(10 + rank, 1.0 + number, rank, 2, number) for number in range(3) for rank in range(2)),
]
"""Two ranks do steps 0, 1 and 2 at 1, 2 and 3 s."""


def test_the_group_is_whole_when_the_last_rank_has_done_a_step_in_a_new_group() -> None:
    notes = [
        *BEFORE,
        step(10, 3.6, 0, 2, 3),  # finished by a group of before the fault: no recovery
        Note(what="begun", at=4.0, pid=21),
        formed(20, 4.5, 0, 2), formed(21, 4.6, 1, 2),
        step(20, 5.0, 0, 2, 2), step(21, 5.25, 1, 2, 2), step(20, 6.0, 0, 2, 3),
    ]  # fmt: skip
    recovery = find_recovery(notes, struck_at=3.5, world=2)
    assert recovery is not None
    assert (recovery.seconds, recovery.next_step) == (1.75, 1.5)
    assert recovery.pause == 5.0 - 3.6
    assert recovery.redone == 2
    assert recovery.milestones == {"begun": 0.5, "formed": 4.6 - 3.5}


def test_survivors_that_go_on_alone_are_a_next_step_but_not_a_whole_group() -> None:
    alone = [*BEFORE, formed(10, 3.6, 0, 1), step(10, 3.75, 0, 1, 3)]
    assert find_recovery(alone, struck_at=3.5, world=2) is None
    again = [
        *alone,
        formed(10, 5.0, 0, 2),
        formed(22, 5.0, 1, 2),
        step(10, 5.5, 0, 2, 4),
        step(22, 5.5, 1, 2, 4),
    ]
    recovery = find_recovery(again, struck_at=3.5, world=2)
    assert recovery is not None
    assert (recovery.next_step, recovery.seconds, recovery.redone) == (0.25, 2.0, 0)


def test_a_group_that_lacks_a_rank_is_not_whole() -> None:
    notes = [
        *BEFORE,
        formed(20, 4.0, 0, 3),
        formed(21, 4.0, 2, 3),
        step(20, 5, 0, 3, 3),
        step(21, 5, 2, 3, 3),
    ]
    assert find_recovery(notes, struck_at=3.5, world=3) is None


def test_the_workers_are_those_of_the_newest_group() -> None:
    assert workers(BEFORE, 2) == {0: 10, 1: 11}
    assert workers(BEFORE, 3) == {}
    forming = [*BEFORE, formed(21, 4.0, 1, 2)]
    assert workers(forming, 2) == {}, "rank 1 has not done a step in the new group"
    assert workers([*forming, step(21, 5.0, 1, 2, 3)], 2) == {0: 10, 1: 21}


def test_a_line_that_is_being_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    whole = {"what": "step", "at": 2.0, "step": 7, "rank": 0, "world": 1, "pid": 5}
    (tmp_path / "b.jsonl").write_text(json.dumps(whole) + '\n{"what": "st')
    (tmp_path / "a.jsonl").write_text(json.dumps({**whole, "at": 1.0}) + "\n")
    assert [note.at for note in read_notes(tmp_path)] == [1.0, 2.0]
