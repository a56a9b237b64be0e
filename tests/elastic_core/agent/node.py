"""What the tests of worker processes share: a node without a rendezvous, and looks into /proc."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, TypeVar

from elastic_core.agent.worker_group import (
    Entrypoint,
    ForkServerWarmed,
    WorkerEvent,
    WorkerExited,
    WorkerGroup,
    WorkerSaid,
    WorkerSpec,
)
from elastic_core.clock import SystemClock
from elastic_core.model.failure import Failure
from elastic_core.model.messages import WorkerFailed

Event = TypeVar("Event", bound=WorkerEvent)

DEADLINE_S = 60.0
"""Bounds every wait; nothing takes so long unless it hangs."""


class Node:
    """A worker group on a program whose text each test writes anew; the fork server stays warm."""

    def __init__(self, **spec: Any) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="et-"))
        self.program = self.directory / "program.py"
        self.logs = self.directory / "logs"
        self.heard: list[WorkerEvent] = []
        self._events: queue.Queue[WorkerEvent] = queue.Queue()
        fields: dict[str, Any] = {
            "slots": 1,
            "api": "torchrun",
            "entrypoint": Entrypoint("script", str(self.program)),
            "log_dir": self.logs,
            "environment": {**os.environ, "TEST_NODE": str(self.directory)},
        }
        self.spec = WorkerSpec(**{**fields, **spec})
        self.group = WorkerGroup(
            spec=self.spec, events=self._events.put, socket_dir=self.directory, clock=SystemClock()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.group.close()
        shutil.rmtree(self.directory)

    def warm(self) -> ForkServerWarmed:
        """Start the fork server and wait for it."""
        self.group.warm()
        return self.wait_for(ForkServerWarmed)

    def write(self, text: str) -> None:
        """Make `text` the program of the next workers, and forget what was heard and logged."""
        self.program.write_text(textwrap.dedent(text))
        self.heard.clear()
        for log in self.logs.glob("worker-*.log"):
            log.unlink()

    def start(self, text: str, *environments: Mapping[str, str]) -> None:
        """Start workers on `text`."""
        self.write(text)
        self.group.start(environments or [{}] * self.spec.slots)

    def run(self, text: str, environment: Mapping[str, str] | None = None) -> int:
        """Run `text` in one worker to its end and return its code."""
        self.start(text, environment or {})
        return self.wait_for(WorkerExited).exit.code

    def wait_for(self, kind: type[Event], which: Callable[[Event], bool] = lambda _: True) -> Event:
        """Return the next event of a kind; those before it are in `heard`."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            self.heard.append(event)
            if isinstance(event, kind) and which(event):
                return event

    def failure(self) -> Failure:
        """Return the only failure that was told."""
        (failure,) = [
            event.message.failure
            for event in self.heard
            if isinstance(event, WorkerSaid) and isinstance(event.message, WorkerFailed)
        ]
        return failure

    def run_all(self, text: str) -> list[int]:
        """Run `text` in all workers to their ends and return their codes."""
        self.start(text)
        return [self.wait_for(WorkerExited).exit.code for _ in range(self.spec.slots)]

    def server_pid(self) -> int:
        """Return the process id of the fork server."""
        found: list[int] = []

        def is_there() -> bool:
            found[:] = [
                pid
                for pid in descendants(os.getpid())
                if name_of(pid) == "elastic-fork" and f"TEST_NODE={self.directory}" in environment_of(pid)
            ]
            return len(found) == 1

        wait_until(is_there, "there is one fork server")
        return found[0]

    def worker_pid(self, local_rank: int) -> int:
        """Return the process id of a worker's main process; it takes its name after it began."""
        server = self.server_pid()
        found: list[int] = []

        def is_there() -> bool:
            below = descendants(server)
            found[:] = [pid for pid in below if name_of(pid) == f"worker-{local_rank}" and _leads(pid)]
            return len(found) == 1

        wait_until(is_there, f"there is one worker {local_rank}")
        return found[0]

    def output(self, local_rank: int = 0) -> str:
        """Return all that a worker wrote."""
        path = self.logs / f"worker-{local_rank}.log"
        return path.read_text() if path.exists() else ""

    def wait_for_output(self, text: str, local_rank: int = 0) -> None:
        """Wait until a worker has written a text."""
        wait_until(lambda: text in self.output(local_rank), f"the output holds {text!r}")


def _leads(pid: int) -> bool:
    """Whether a process leads its session; one that has just ended does not."""
    try:
        return os.getsid(pid) == pid
    except ProcessLookupError:
        return False


def wait_until(holds: Callable[[], bool], what: str, deadline_s: float = DEADLINE_S) -> None:
    """Look again and again until a condition holds, or fail at the deadline."""
    end = time.monotonic() + deadline_s
    while not holds():
        assert time.monotonic() < end, f"not within {deadline_s} s: {what}"
        time.sleep(0.002)


def state_of(pid: int) -> str:
    """Return a process's state as the kernel writes it (R, S, T, Z), or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def is_alive(pid: int) -> bool:
    """Tell whether a process runs: a zombie does not."""
    return state_of(pid) not in ("", "Z", "X")


def name_of(pid: int) -> str:
    """Return a process's name, or "" if there is none."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def environment_of(pid: int) -> list[str]:
    """Return the variables that a process was executed with."""
    try:
        return Path(f"/proc/{pid}/environ").read_text().split("\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return []


def descendants(pid: int) -> set[int]:
    """Return all processes below one, whichever session they are in."""
    parents: dict[int, int] = {}
    for path in (process / "stat" for process in Path("/proc").glob("[0-9]*")):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parents[int(path.parent.name)] = int(fields[1])
    found: set[int] = set()
    level = {pid}
    while level:
        level = {child for child, parent in parents.items() if parent in level} - found
        found |= level
    return found


def kill(pid: int) -> None:
    """Kill a process as `kill -9` does."""
    os.kill(pid, signal.SIGKILL)
