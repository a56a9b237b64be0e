"""Failures: what ended a worker, bounded in size and fit for the first root cause."""

from __future__ import annotations

from dataclasses import dataclass

from elastic_core.ids import NodeId

MAX_TEXT = 8_000
"""Characters kept of a traceback or a log's end: a store's value must stay small."""


def bound(text: str, limit: int = MAX_TEXT) -> str:
    """Return the end of `text` within `limit` characters, saying what was cut."""
    if len(text) <= limit:
        return text
    cut = len(text) - limit
    return f"[{cut} characters cut]\n{text[cut:]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerExit:
    """The end of one worker process.

    Attributes:
        code: The process's own exit code, or minus the signal that ended it.
    """

    local_rank: int
    pid: int
    code: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why a worker failed; the value of `failures/{generation}/{node_id}`.

    Attributes:
        exit_code: As a shell shows it: the script's own, or 128 + signal.
        message: "ValueError: bad label 7", "died by signal 9 (SIGKILL), possibly out of memory".
        location: "file.py:12" of the innermost frame of the user's code, or "".
        step: Last finished step, or -1 where the worker never reported one.
        started: Whether a process group had been formed: without it a restart is pointless.
        consequence: True if a peer's end explains it (a broken collective, or our own stop).
        log_tail: The last lines that the worker wrote.
        wall_time: Seconds since the epoch on the node, for reports only.
    """

    node_id: NodeId
    generation: int
    rank: int
    local_rank: int
    exit_code: int
    message: str
    location: str = ""
    traceback: str = ""
    step: int = -1
    started: bool = False
    consequence: bool = False
    log_tail: str = ""
    wall_time: float = 0.0

    def headline(self) -> str:
        """Return the one line that a person reads first."""
        where = f" at {self.location}" if self.location else ""
        return f"rank {self.rank} on node {self.node_id}: {self.message}{where}{self._when()}"

    def _when(self) -> str:
        """Return how far the worker was: of one that trained and reports no steps it is not known."""
        if self.step >= 0:
            return f" after step {self.step}"
        return "" if self.started else " before its first step"
