"""What workers wrote down during a measurement, and when a group was whole again after a fault.

A group is whole when every rank of the expected world has finished a step in a process
group that was formed after the fault. Times are the workers' own: nothing is polled.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

MILESTONES = ("begun", "imported", "formed", "ready")


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A line of a worker: what it had done when; rank and world only once it is in a group."""

    what: str
    at: float
    pid: int
    step: int = -1
    rank: int = -1
    world: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The way back after a fault.

    Attributes:
        seconds: From the fault until the last rank had finished its first step.
        next_step: From the fault until any worker had finished a step in a group formed after it.
        pause: The longest time without a finished step of rank 0 on the way.
        redone: Finished steps that were done again.
        milestones: Seconds from the fault until the last worker of the new group had come so far.
    """

    seconds: float
    next_step: float
    pause: float
    redone: int
    milestones: dict[str, float] = field(default_factory=dict)


def read_notes(directory: Path) -> list[Note]:
    """Return the whole lines of all workers, by time."""
    notes = []
    for path in directory.glob("*.jsonl"):
        lines = path.read_text().split("\n")[:-1]
        notes += [Note(**json.loads(line)) for line in lines]
    return sorted(notes, key=lambda note: note.at)


def workers(notes: Sequence[Note], world: int) -> dict[int, int]:
    """Return the pid of each rank of the newest group, {} unless all `world` of them have done a step."""
    found: dict[int, int] = {}
    for note in notes:
        if note.what == "formed" and note.rank in found and note.pid != found[note.rank]:
            del found[note.rank]
        if note.what == "step":
            found[note.rank] = note.pid if note.world == world else -1
    is_whole = sorted(found) == list(range(world)) and -1 not in found.values()
    return found if is_whole else {}


def find_recovery(notes: Sequence[Note], *, struck_at: float, world: int) -> Recovery | None:
    """Return how the group came back after a fault, None if it has not."""
    old, new = _steps(notes, struck_at)
    whole: dict[int, Note] = {}
    for note in new:
        if note.world == world:
            whole.setdefault(note.rank, note)
    if sorted(whole) != list(range(world)):
        return None
    back_at = max(note.at for note in whole.values())
    pids = {note.pid for note in whole.values()}
    times = {
        what: [note.at for note in notes if note.what == what and note.pid in pids and note.at > struck_at]
        for what in MILESTONES
    }
    return Recovery(
        seconds=back_at - struck_at,
        next_step=new[0].at - struck_at,
        pause=_longest_pause([*old, *new], struck_at, back_at),
        redone=max(0, max((note.step for note in old), default=-1) + 1 - new[0].step),
        milestones={what: max(each) - struck_at for what, each in times.items() if each},
    )


def _steps(notes: Sequence[Note], struck_at: float) -> tuple[list[Note], list[Note]]:
    """Return the finished steps of groups formed before the fault, and of those formed after it."""
    formed: dict[int, float] = {}
    old: list[Note] = []
    new: list[Note] = []
    for note in notes:
        if note.what == "formed":
            formed[note.pid] = note.at
        elif note.what == "step":
            (new if formed.get(note.pid, 0.0) > struck_at else old).append(note)
    return old, new


def _longest_pause(steps: Sequence[Note], struck_at: float, back_at: float) -> float:
    """Return the longest time between two steps of rank 0, from the last one before the fault on."""
    times = sorted(note.at for note in steps if note.rank == 0 and note.at <= back_at)
    before = [at for at in times if at <= struck_at][-1:]
    marks = [*(before or [struck_at]), *(at for at in times if at > struck_at), back_at]
    return max(later - earlier for earlier, later in pairwise(marks))
