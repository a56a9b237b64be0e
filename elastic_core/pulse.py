"""A worker's pulse: what it does and since when, in a page of memory that its agent looks at.

The worker writes a few numbers into a mapped file at each turn of a step, which costs
no system call and no message; the agent reads them when it likes. So a rank that does not come to
the collective can be told from those that wait for it there. Times are CLOCK_MONOTONIC, which all
processes of a machine share.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final, Self

PULSE_FILE: Final = "ELASTIC_PULSE"
"""Variable that names the file; the agent sets it, a worker that knows it keeps a pulse."""

_BEAT: Final = struct.Struct("=qqqqddd")
_SIZE: Final = mmap.PAGESIZE


class Doing(IntEnum):
    """What a worker does."""

    NOTHING = 0
    """Nothing that is awaited: it is in no generation, or keeps no pulse."""
    WORKING = 1
    """It computes a step: its peers wait for it, or will."""
    WAITING = 2
    """It is in a collective and waits for its peers."""
    OTHER = 3
    """It evaluates, saves or hands over state; nobody knows how long that may take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """One look at a pulse.

    Attributes:
        pid: Process that wrote it.
        step: Finished steps, which is the index of the one that is computed.
        done: Steps that this process finished.
        since: Since when it does what it does.
        work: What the last finished step took of this worker alone, without waiting for peers.
        longest: The longest of these so far.
    """

    pid: int = 0
    doing: Doing = Doing.NOTHING
    step: int = 0
    done: int = 0
    since: float = 0.0
    work: float = 0.0
    longest: float = 0.0


class Pulse:
    """The worker's end; without a file it beats unseen."""

    def __init__(self, path: Path | None = None, *, now: Callable[[], float] = time.monotonic) -> None:
        """Begin to beat into a file, which is made anew."""
        self._now = now
        self._memory: mmap.mmap | bytearray = bytearray(_SIZE) if path is None else _map(path)
        self._pid = os.getpid()
        self._doing = Doing.NOTHING
        self._step = self._done = 0
        self._since = self._work = self._longest = 0.0
        self._spent = 0.0
        self._write()

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self:
        """Return the pulse that the agent's variables ask for."""
        name = environment.get(PULSE_FILE, "")
        return cls(Path(name) if name else None)

    @property
    def work(self) -> float:
        """Seconds that the last finished step took of this worker alone; 0 before the first."""
        return self._work

    def begin_step(self, step: int) -> None:
        """The worker begins to compute a step."""
        self._step, self._spent = step, 0.0
        self.do(Doing.WORKING)

    def end_step(self) -> None:
        """The step is done."""
        self._turn(Doing.OTHER)
        self._done += 1
        self._work = self._spent
        self._longest = max(self._longest, self._work)
        self._write()

    def do(self, doing: Doing) -> None:
        """The worker turns to something else."""
        self._turn(doing)
        self._write()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for peers within the block."""
        before = self._doing
        self.do(Doing.WAITING)
        try:
            yield
        finally:
            self.do(before)

    def _turn(self, doing: Doing) -> None:
        now = self._now()
        if self._doing is Doing.WORKING:
            self._spent += now - self._since
        self._doing, self._since = doing, now

    def _write(self) -> None:
        numbers = (self._pid, self._doing, self._step, self._done, self._since, self._work, self._longest)
        _BEAT.pack_into(self._memory, 0, *numbers)


def read_beat(path: Path) -> Beat:
    """Return what a pulse says now; a file that is not there says nothing.

    A look in the midst of a write may mix two beats; whoever judges looks more than once.
    """
    try:
        data = path.read_bytes()[: _BEAT.size]
    except OSError:
        return Beat()
    if len(data) < _BEAT.size:
        return Beat()
    pid, doing, step, done, since, work, longest = _BEAT.unpack(data)
    kind = Doing(doing) if doing in Doing._value2member_map_ else Doing.OTHER
    return Beat(pid=pid, doing=kind, step=step, done=done, since=since, work=work, longest=longest)


def _map(path: Path) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(descriptor, _SIZE)
        return mmap.mmap(descriptor, _SIZE)
    finally:
        os.close(descriptor)
