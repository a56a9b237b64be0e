"""The fork server: a warmed process without threads, of which workers are forked.

It has imported torch and used an optimizer and a backward pass once (their first
use imports seconds' worth of modules), and the modules that the job names. It is
the parent of all workers of a node: it starts, signals and reaps them, and ends
what they leave behind. Requests and reports are JSON lines on one socket:

    {"setup": {...}}                         first of all: what to warm
    {"launch": {...}}                        start a worker
    {"signal": n, "number": 15}              signal its main process only
    {"kill": n}                              kill it and everything in its session

    {"unfit": reason}                        this node cannot compute; it ends
    {"warm": notice}                         requests are served from now on
    {"started": n, "pid": pid}
    {"refused": n, "reason": text}           no process could be made
    {"exited": n, "pid": pid, "code": code}  code as of `subprocess`: minus the signal

Where a fork would be unsafe (more than one thread, or a CUDA context: neither
survives it) and where it was not asked for, workers are fresh interpreters. The
end of the socket is the agent's end: then everything is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from elastic_core.agent.fitness import bad_in_child
from elastic_core.agent.process import (
    Entrypoint,
    Launch,
    adopt_orphans,
    become_worker,
    die_with_parent,
    launch_from_json,
    name_process,
    reseed,
    write_launch,
)
from elastic_core.agent.runner import find_modules_of, run
from elastic_core.channel import SNAPSHOT_MEMORY, WORKER_LAUNCH, LineBuffer

_CLOSE_S: Final = 2.0
"""Seconds in which killed processes must have ended; only a broken kernel or disk takes longer."""

_GPU_DEVICES: Final = ("/dev/nvidia0", "/dev/kfd")
_GPU_IN_USE: Final = ("/dev/nvidia-uvm", "/dev/kfd")
"""Device files that a process has open once it has touched CUDA or ROCm, by whichever library."""


# ---- warming ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Warmth:
    """What warming came to.

    Attributes:
        forks: Whether workers are forked of this process.
        notice: What people should know about it, or "".
    """

    forks: bool
    notice: str = ""


def warm_up(entrypoint: Entrypoint, preload: Sequence[str], start_method: str) -> Warmth:
    """Import and use once what workers will need, and find out whether a fork is safe after it."""
    if entrypoint.kind == "command":
        return Warmth(forks=True)
    if start_method == "spawn":
        return Warmth(forks=False)
    find_modules_of(entrypoint)
    if importlib.util.find_spec("torch"):
        _warm_torch()
    notices = [notice for name in preload if (notice := _preload(name))]
    danger = _danger()
    if danger:
        notices.append(f"workers are spawned, not forked: {danger}")
    gc.collect()
    gc.freeze()  # what is here now is never collected, so that its pages stay shared
    return Warmth(forks=not danger, notice="; ".join(notices))


def _warm_torch() -> None:
    # Imported here and nowhere else: a fork server for another program does without.
    import torch
    import torch.distributed
    import torch.nn.parallel

    torch.set_num_threads(1)  # an OpenMP pool does not survive a fork
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if not any(Path(device).exists() for device in _GPU_DEVICES):
        # With a GPU, a backward pass counts devices, and that makes CUDA unusable after a fork.
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _preload(name: str) -> str:
    try:
        importlib.import_module(name)
    except (Exception, SystemExit) as error:
        return f"preload of {name!r} failed, workers import it themselves: {type(error).__name__}: {error}"
    return ""


def _danger() -> str:
    """Return why a fork is unsafe now, or ""."""
    threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    if len(threads) > 1:
        return f"preloading left {len(threads)} threads ({', '.join(sorted(threads)[:5])})"
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return "preloading left a CUDA context"
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if str(descriptor.readlink()) in _GPU_IN_USE:
                return f"preloading opened {descriptor.readlink()}"
    return ""


def _set_torch_threads() -> None:
    """Let torch have, in a forked worker, as many threads as it would have in a fresh process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        threads = os.environ.get("OMP_NUM_THREADS", "")
        torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else os.cpu_count())


# ---- serving ---------------------------------------------------------------------------------


class ForkServer:
    """Serves the requests of one agent, and is the parent of its workers."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._buffer = LineBuffer()
        self._workers: dict[int, int] = {}
        self._doomed: set[int] = set()
        """Launch number of each living worker, by process id."""
        self._snapshots: dict[int, tuple[int, int]] = {}
        """Memory for the snapshots of each local rank; it outlives workers and ends with this process."""
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def warm(self) -> Warmth:
        """Wait for the setup, warm up, say so, and return the result.

        Raises:
            EOFError: The agent is gone, or this node is unfit.
        """
        request = self._first_request()["setup"]
        warmth = warm_up(
            Entrypoint(**request["entrypoint"]), tuple(request["preload"]), request["start_method"]
        )
        can_look = request["preflight"] and warmth.forks and "torch" in sys.modules
        if can_look and (bad := bad_in_child()):
            self._report({"unfit": bad})
            raise EOFError(bad)
        self._report({"warm": warmth.notice})
        return warmth

    def serve(self, warmth: Warmth) -> Launch | None:
        """Serve until the agent has gone; in a forked worker, return what it is to run."""
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to write into the pipe
        signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._connection, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        self._reap()
        pending: list[bytes] = []
        while True:
            for line in pending:
                launch = self._handle(json.loads(line), warmth)
                if launch is not None:
                    return launch
            pending = []
            for descriptor, _ in poll.poll():
                if descriptor == self._wake:
                    self._reap()
                elif (lines := self._receive()) is None:
                    return None
                else:
                    pending = lines

    def forget(self) -> None:
        """Close, in a forked worker, what belongs to the server."""
        signal.set_wakeup_fd(-1)
        self._connection.close()
        os.close(self._wake)
        os.close(self._woken)

    def end(self) -> None:
        """Kill all workers and all that descends from them."""
        for process in self._workers:
            _kill_session(process)
        deadline = time.monotonic() + _CLOSE_S
        while time.monotonic() < deadline and _children():
            select.select([self._wake], [], [], 0.1)
            self._reap()

    def _first_request(self) -> Any:
        while True:
            lines = self._receive()
            if lines is None:
                raise EOFError("the agent went before it said what to warm")
            if lines:
                return json.loads(lines[0])

    def _receive(self) -> list[bytes] | None:
        data = self._connection.recv(1 << 16)
        return self._buffer.feed(data) if data else None

    def _report(self, report: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the agent is gone: the next read says so
            self._connection.sendall(json.dumps(report).encode() + b"\n")

    def _handle(self, request: dict[str, Any], warmth: Warmth) -> Launch | None:
        """Do what is asked; in a forked worker, return what it is to run."""
        if "launch" in request:
            return self._launch(launch_from_json(request["launch"]), warmth)
        for process, number in self._workers.items():
            if number == request.get("signal"):
                os.kill(process, request["number"])
            elif number == request.get("kill"):
                _kill_session(process)
        return None

    def _launch(self, launch: Launch, warmth: Warmth) -> Launch | None:
        launch = self._with_memory(launch)
        try:
            process = os.fork() if warmth.forks else _spawn(launch)
        except OSError as error:
            self._report({"refused": launch.number, "reason": f"cannot start a process: {error.strerror}"})
            return None
        if process == 0:
            return launch
        self._workers[process] = launch.number
        self._report({"started": launch.number, "pid": process})
        return None

    def _with_memory(self, launch: Launch) -> Launch:
        """Return the launch with its local rank's memory, which takes no page before it is written to."""
        memory = self._snapshots.get(launch.local_rank)
        if memory is None:
            memory = _memory_file(), _memory_file()
            self._snapshots[launch.local_rank] = memory
        named = {SNAPSHOT_MEMORY: ",".join(map(str, memory))}
        return replace(launch, environment={**launch.environment, **named})

    def _reap(self) -> None:
        """Reap all dead children, report the workers among them, and end what they left behind."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 1 << 12)
        reaped = False
        for process, code in _dead_children():
            reaped = True
            number = self._workers.get(process)
            if number is not None:
                _kill_session(process)  # while its process id cannot be another's yet
                del self._workers[process]
            os.waitpid(process, 0)
            self._doomed.discard(process)
            if number is not None:
                self._report({"exited": number, "pid": process, "code": code})
        if reaped:
            self._end_orphans()

    def _end_orphans(self) -> None:
        """Kill adopted descendants of dead workers, whichever session they are in.

        Each death may bring new ones, so all children are looked at again; hundreds that die one after
        another would cost the square of their number if those already killed were judged again.
        """
        launches = set(self._workers.values())
        for process in _children():
            if process in self._workers or process in self._doomed:
                continue
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if os.getsid(process) not in self._workers and _launch_of(process) not in launches:
                    os.kill(process, signal.SIGKILL)
                    self._doomed.add(process)


def _memory_file() -> int:
    descriptor = os.memfd_create("snapshot", 0)
    os.set_inheritable(descriptor, True)
    return descriptor


def _spawn(launch: Launch) -> int:
    descriptor = write_launch(launch)
    command = [sys.executable, "-m", "elastic_core.agent.runner", str(descriptor), str(os.getpid())]
    try:
        return os.posix_spawn(sys.executable, command, dict(launch.environment), setsid=True)
    finally:
        os.close(descriptor)


def _kill_session(leader: int) -> None:
    for kill in (os.killpg, os.kill):  # a worker may have joined another group than its own
        with contextlib.suppress(ProcessLookupError):
            kill(leader, signal.SIGKILL)


def _dead_children() -> Iterator[tuple[int, int]]:
    """Yield process id and code of each dead child; the caller reaps it before it asks for the next."""
    while True:
        try:
            end = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if end is None:
            return
        yield end.si_pid, end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _children() -> list[int]:
    children: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread has just ended
            children += map(int, task.joinpath("children").read_text().split())
    return children


def _launch_of(process: int) -> int:
    """Return the launch that a program executed by a worker descends from, or -1."""
    prefix = f"{WORKER_LAUNCH}=".encode()
    with contextlib.suppress(OSError, ValueError):
        for variable in Path(f"/proc/{process}/environ").read_bytes().split(b"\0"):
            if variable.startswith(prefix):
                return int(variable.removeprefix(prefix))
    return -1


def main() -> None:
    """Serve on the socket argv[1], as a child of process argv[2]."""
    descriptor, agent = int(sys.argv[1]), int(sys.argv[2])
    die_with_parent(agent)
    adopt_orphans()
    name_process("elastic-fork")
    os.set_inheritable(descriptor, False)
    server = ForkServer(socket.socket(fileno=descriptor))
    own = os.getpid()
    try:
        warmth = server.warm()
    except EOFError:
        return
    launch = server.serve(warmth)
    if launch is None:
        server.end()
        return
    server.forget()
    become_worker(launch, own)
    reseed()
    _set_torch_threads()
    sys.exit(run(launch))


if __name__ == "__main__":
    main()
