"""A worker process: what it runs, and how a fresh process becomes it.

Its life hangs on its parent's: the kernel kills it when the parent dies
(PR_SET_PDEATHSIG), and so its own forked children in turn. The setting follows
the parent *thread*, so a child that another thread than the main one forks gets
a watching thread instead. Free of torch, and of everything that takes long to import.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import io
import json
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from elastic_core.output import lossy

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_NAME: Final = 15
_PR_SET_CHILD_SUBREAPER: Final = 36

STACK_FILE: Final = "ELASTIC_STACK_FILE"
"""Variable that names the file to which a worker appends its stacks when it is asked for them."""
STACK_SIGNAL: Final = signal.SIGRTMIN + 7
"""Asks for them: a number that neither Python, torch nor the C library uses."""


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """The program that workers run.

    Attributes:
        kind: "script": a Python file, as `python target`; "module": as `python -m target`;
            "command": any program, executed without Python (nothing can be warmed for it).
        target: Path, module name or program.
    """

    kind: Literal["script", "module", "command"]
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One start of one worker.

    Attributes:
        number: Unique within the agent; what the worker is called by until it has ended.
        environment: All its variables.
        directory: Working directory.
        log: File to which it appends what it writes, "" for its parent's output.
    """

    number: int
    local_rank: int
    entrypoint: Entrypoint
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    directory: str = "."
    log: str = ""


def launch_from_json(data: Mapping[str, Any]) -> Launch:
    """Return the launch whose fields were written as JSON."""
    entrypoint = Entrypoint(**data["entrypoint"])
    return Launch(**{**data, "entrypoint": entrypoint, "args": tuple(data["args"])})


def write_launch(launch: Launch) -> int:
    """Return a descriptor, inheritable, from which a fresh interpreter reads the launch."""
    descriptor = os.memfd_create("launch", 0)
    os.set_inheritable(descriptor, True)
    with os.fdopen(os.dup(descriptor), "w") as stream:
        json.dump(asdict(launch), stream)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def read_launch(descriptor: int) -> Launch:
    """Read and close what `write_launch` returned."""
    with os.fdopen(descriptor) as stream:
        return launch_from_json(json.load(stream))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when the thread that started it ends.

    Args:
        parent: Process id of the parent as it was at the fork. If that one is dead already, so
            is this process: the kernel would not tell.
    """
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Become the parent of all descendants whose own parent dies, so that they can be ended and reaped."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def name_process(name: str) -> None:
    """Set the name that `ps` and `top` show, of which the kernel keeps 15 characters."""
    _LIBC.prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def become_worker(launch: Launch, parent: int) -> None:
    """Turn this process into the worker: session, streams, environment, signals, random state.

    Raises:
        OSError: The working directory or the log is not usable.
    """
    die_with_parent(parent)
    with contextlib.suppress(PermissionError):  # a spawned one leads its session already
        os.setsid()
    name_process(f"worker-{launch.local_rank}")
    _reset_signals()
    _redirect(launch.log)
    os.chdir(launch.directory)
    os.environ.clear()
    os.environ.update(launch.environment)
    time.tzset()
    faulthandler.enable()
    _offer_stacks(launch.environment.get(STACK_FILE, ""))
    _bind_children()


def _offer_stacks(name: str) -> None:
    """Have the stacks of all threads written to a file on `STACK_SIGNAL`."""
    if name:
        descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(STACK_SIGNAL, file=descriptor)


def reseed() -> None:
    """Give a forked process random numbers of its own, as a fresh interpreter has.

    Python's own generator does that itself at each fork.
    """
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed()
    if torch is not None:
        torch.default_generator.seed()  # of the CPU only: others are made in the worker


def _prctl(option: int, value: int) -> None:
    if _LIBC.prctl(option, value, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}, {value}): {os.strerror(number)}")


def _reset_signals() -> None:
    """Undo what a forking parent set up, and what its own parent made it ignore."""
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        if signal.getsignal(number) is not None:
            with contextlib.suppress(OSError):  # reserved by the C library
                signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as every Python process has it
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _redirect(log: str) -> None:
    """Read nothing, and append output to `log`, line by line so that a killed worker's last words stay.

    What a full disk does not take of it is dropped.
    """
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        os.close(descriptor)
        sys.stdout, sys.stderr = lossy(sys.stdout), lossy(sys.stderr)
        return
    for text in (sys.stdout, sys.stderr):
        if isinstance(text, io.TextIOWrapper):
            text.reconfigure(line_buffering=True)


def _bind_children() -> None:
    """Have each child that this process or a child of it forks die with the process that forked it."""
    forker = threading.local()  # two threads may fork at once

    def note() -> None:
        forker.process = os.getpid()
        forker.is_main_thread = threading.get_native_id() == forker.process

    def bind() -> None:
        if forker.is_main_thread:
            die_with_parent(forker.process)
        else:
            threading.Thread(
                target=_follow, args=(forker.process,), name="follow-parent", daemon=True
            ).start()

    os.register_at_fork(before=note, after_in_child=bind)


def _follow(parent: int) -> None:
    """End this process when its parent has ended."""
    with contextlib.suppress(ProcessLookupError):
        descriptor = os.pidfd_open(parent)
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
        if os.getppid() == parent:
            poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
