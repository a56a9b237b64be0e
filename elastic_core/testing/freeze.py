"""A process that stands still: what a swapped-out, suspended or overloaded machine looks like."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def frozen(pid: int) -> Iterator[None]:
    """Freeze a child process for the block; it has stopped when the block begins, not a moment later."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
