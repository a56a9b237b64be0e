"""What the training programs of a measurement have in common: their pace, and the lines they write."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

STEP_S = 0.06
"""A step takes so long on a machine of any speed."""
EVERY_STEPS = 20
"""Steps between two checkpoints."""


class Diary:
    """The lines of this process, in a file of its own; to be made when all imports are done."""

    def __init__(self) -> None:
        self.directory = Path(os.environ["BENCH_DIRECTORY"])
        path = self.directory / f"{os.environ['BENCH_NODE']}-{os.getpid()}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self.note("begun", at=_process_start())
        self.note("imported")

    def note(self, what: str, *, at: float = 0.0, step: int = -1, rank: int = -1, world: int = 0) -> None:
        """Write one line: what was done, now or `at`."""
        line = {"what": what, "at": at or time.time(), "step": step, "rank": rank, "world": world}
        os.write(self._descriptor, json.dumps({**line, "pid": os.getpid()}).encode() + b"\n")


def pace(began: float) -> None:
    """Wait until a step that began at this monotonic time has taken its time."""
    time.sleep(max(0.0, began + STEP_S - time.monotonic()))


def _process_start() -> float:
    """Return when this process was started or forked, in seconds since the epoch."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    uptime = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - uptime + ticks / os.sysconf("SC_CLK_TCK")
