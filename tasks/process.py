"""Processes that outlive their starter: identity on disk, liveness, and an end that is certain.

A pid alone is no identity: it comes back after a while, and after a reboot at
once. `ProcessIdentity` adds the start time and the boot, so that a record on
disk never points at a stranger. Waiting uses pidfds: no polling, and it works
for processes that are not our children.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessIdentity:
    """One process of this machine, for ever.

    Attributes:
        start_ticks: Field 22 of /proc/PID/stat: clock ticks since boot at which it started.
        boot: The kernel's boot id.
    """

    pid: int
    start_ticks: int
    boot: str


def identify(pid: int) -> ProcessIdentity | None:
    """Return who a pid is now, or None if no such process runs (a zombie does not run)."""
    start = _start_of_running(pid)
    return None if start is None else ProcessIdentity(pid=pid, start_ticks=start, boot=_boot())


def spawn(command: Sequence[str], *, environment: Mapping[str, str], log: Path) -> int:
    """Start a program as leader of its own session, its output appended to `log`; return its pid.

    It outlives us: no terminal, no process group and no pipe ties it to its starter. Signals that
    we ignore (a shell's background jobs ignore SIGINT) are not ignored by it. On return its
    environment can be read: whoever looks for its mark finds it.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    pid = os.posix_spawnp(
        command[0],
        list(command),
        dict(environment),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE],
    )
    if environment:
        _wait_for_environment(pid)
    return pid


def _wait_for_environment(pid: int, timeout_s: float = 1.0) -> None:
    """Wait out the instant within exec when the old memory is gone and /proc shows nothing of the new one.

    posix_spawn comes back at its beginning, and the kernel tells nobody about its end.
    """
    deadline = time.monotonic() + timeout_s
    while _parts(pid, "environ") == [""] and identify(pid) is not None and time.monotonic() < deadline:
        time.sleep(0.0005)


def is_running(process: ProcessIdentity) -> bool:
    """Return whether this very process still runs."""
    return identify(process.pid) == process


def send(process: ProcessIdentity, number: signal.Signals) -> bool:
    """Signal this very process; return False if it is gone. A successor of its pid is never hit."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    try:
        # The handle pins the process first, then the check holds for what the signal will reach.
        if not is_running(process):
            return False
        signal.pidfd_send_signal(handle, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(handle)
    return True


def wait_ended(processes: Collection[ProcessIdentity], timeout_s: float) -> set[ProcessIdentity]:
    """Wait until all have ended or the time is up; return those that still run."""
    deadline = time.monotonic() + timeout_s
    poller = select.poll()
    waiting: dict[int, ProcessIdentity] = {}
    with contextlib.ExitStack() as handles:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                handle = os.pidfd_open(process.pid)
                handles.callback(os.close, handle)
                if is_running(process):
                    waiting[handle] = process
                    poller.register(handle, select.POLLIN)
        while waiting and (left := deadline - time.monotonic()) > 0:
            for handle, _ in poller.poll(left * 1000):
                poller.unregister(handle)
                del waiting[handle]
    return set(waiting.values())


def end(processes: Collection[ProcessIdentity], grace_s: float) -> None:
    """End processes: SIGTERM, then SIGKILL after `grace_s`; returns when all are gone."""
    running = {process for process in processes if send(process, signal.SIGTERM)}
    stubborn = wait_ended(running, grace_s)
    for process in stubborn:
        send(process, signal.SIGKILL)
    wait_ended(stubborn, 5.0)


def carrying(variable: str, value: str) -> list[ProcessIdentity]:
    """Return all running processes whose environment at exec holds `variable=value`.

    A mark in the environment reaches every descendant, whatever session or group it moved to,
    and survives the death of all its ancestors.
    """
    return _found_in("environ", f"{variable}={value}")


def with_argument(argument: str) -> list[ProcessIdentity]:
    """Return all running processes that have `argument` on their command line."""
    return _found_in("cmdline", argument)


def marked(variable: str) -> list[tuple[ProcessIdentity, str]]:
    """Return all running processes whose environment at exec holds a variable, each with its value."""
    return _starting_with("environ", f"{variable}=")


def with_argument_below(path: Path) -> list[tuple[ProcessIdentity, str]]:
    """Return all running processes that were given a path below this one, each with the rest of it."""
    return _starting_with("cmdline", f"{path}/")


def _starting_with(file: str, prefix: str) -> list[tuple[ProcessIdentity, str]]:
    found = []
    for pid in _pids():
        rest = [part.removeprefix(prefix) for part in _parts(pid, file) if part.startswith(prefix)]
        if rest and (process := identify(pid)) is not None:
            found.append((process, rest[0]))
    return found


def _found_in(file: str, text: str) -> list[ProcessIdentity]:
    """Return the processes whose null-separated file in /proc has `text` as one of its parts."""
    found = (identify(pid) for pid in _pids() if text in _parts(pid, file))
    return [process for process in found if process is not None]


def _parts(pid: int, file: str) -> list[str]:
    try:
        return (_PROC / str(pid) / file).read_bytes().decode(errors="surrogateescape").split("\0")
    except OSError:  # it ended, or belongs to somebody else
        return []


def _pids() -> Iterator[int]:
    for entry in _PROC.iterdir():
        if entry.name.isdecimal() and int(entry.name) != os.getpid():
            yield int(entry.name)


def _start_of_running(pid: int) -> int | None:
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except OSError:
        return None
    # The command's name stands in parentheses and may itself hold blanks and parentheses.
    fields = text.rpartition(")")[2].split()
    state, start_ticks = fields[0], int(fields[19])
    return None if state in ("Z", "X") else start_ticks


def _boot() -> str:
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()
