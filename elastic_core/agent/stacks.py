"""Python stacks of a worker that hangs, dumped by itself on a signal, also from within C code.

The worker registers the signal when it starts (`faulthandler`); a program that replaced
Python, or the signal, is not sent it.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Final

from elastic_core.agent.process import STACK_SIGNAL

_PATIENCE_S: Final = 2.0
_LOOK_S: Final = 0.02
_FRAME: Final = re.compile(r'^  File "(.*)", line (\d+) in ', re.MULTILINE)


def is_stopped(pid: int) -> bool:
    """Tell whether a process stands still because of a signal (SIGSTOP, SIGTSTP)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def dump_stacks(pid: int, file: Path) -> str:
    """Have a worker write its stacks, and return them; "" if it does not in time.

    One that was stopped is continued, or it could not: it is to be killed right after.
    """
    if not _catches(pid):
        return ""
    before = _size(file)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
        os.kill(pid, signal.SIGCONT)
    pause, size = threading.Event(), before
    for _ in range(int(_PATIENCE_S / _LOOK_S)):
        pause.wait(_LOOK_S)
        if before < size == _size(file):
            break
        size = _size(file)
    with contextlib.suppress(OSError):
        return file.read_bytes()[before:].decode(errors="replace")
    return ""


def place_of(stacks: str) -> str:
    """Return "file:line" where the thread that was asked stands, in the user's own code if it is in it."""
    _, _, current = stacks.rpartition("Current thread")
    frames = _FRAME.findall(current.partition("\n\n")[0])
    foreign = (
        f"{sys.prefix}{os.sep}",
        f"{sys.base_prefix}{os.sep}",
        "<frozen ",
        str(Path(__file__).parents[1]),
    )
    own = [frame for frame in frames if not frame[0].startswith(foreign)]
    for name, line in own or frames:
        shown = name.removeprefix(f"{Path.cwd()}{os.sep}")
        return f"{shown}:{line}"
    return ""


def _catches(pid: int) -> bool:
    """Tell whether a process has a handler for the signal: without one it would die of it."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1)


def _size(file: Path) -> int:
    try:
        return file.stat().st_size
    except OSError:
        return 0
