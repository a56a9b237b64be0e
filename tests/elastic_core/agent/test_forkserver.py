"""The fork server: what it warms, when it must not fork, and that nothing outlives the agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_core.agent.worker_group import Entrypoint, ForkServerLost, WorkerExited
from tests.elastic_core.agent.node import (
    Node,
    descendants,
    environment_of,
    is_alive,
    kill,
    name_of,
    state_of,
    wait_until,
)

AGENT = """
import os, sys, time
from pathlib import Path
from elastic_core.agent.worker_group import Entrypoint, ForkServerWarmed, WorkerGroup, WorkerSpec
from elastic_core.clock import SystemClock

def hear(event):
    if isinstance(event, ForkServerWarmed):
        print("warm", flush=True)

kind, target, *args = sys.argv[1:]
group = WorkerGroup(
    spec=WorkerSpec(
        slots=2,
        api="torchrun",
        entrypoint=Entrypoint(kind, target),
        args=tuple(args),
        environment=dict(os.environ),
        log_dir=Path(os.environ["LOGS"]),
    ),
    events=hear,
    socket_dir=Path(os.environ["SOCKETS"]),
    clock=SystemClock(),
)
group.warm()
sys.stdin.readline()
group.start([{}, {}])
print("started", flush=True)
time.sleep(600)
"""


@contextmanager
def agent(directory: Path, *program: str) -> Iterator[subprocess.Popen[str]]:
    """Run an agent-like process that is warm when this returns, and starts workers on a line of input."""
    with (
        tempfile.TemporaryDirectory(prefix="et-") as sockets,
        _agent(directory, sockets, *program) as process,
    ):
        yield process


@contextmanager
def _agent(directory: Path, sockets: str, *program: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", AGENT, *program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "LOGS": str(directory), "TEST_AGENT": str(directory), "SOCKETS": sockets},
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "warm\n"
            yield process
        finally:
            process.kill()


def start_workers(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.stdout.readline() == "started\n"


def of_agent(directory: Path) -> set[int]:
    """Return all processes that descend from the agent of a directory, also after its death."""
    mark = f"TEST_AGENT={directory}"
    pids = (int(path.name) for path in Path("/proc").glob("[0-9]*"))
    return {pid for pid in pids if state_of(pid) not in ("", "Z") and mark in environment_of(pid)}


FORKING = """
import os, signal, sys, threading, time
import torch

signal.signal(signal.SIGUSR1, lambda *_: print("alive", os.getpid(), flush=True))

def fork(name):
    told, tell = os.pipe()
    if os.fork() == 0:
        print(name, os.getpid(), flush=True)
        os.write(tell, b"here")
        if name == "child":
            fork("grandchild")
        while True:
            time.sleep(600)
    os.read(told, 4)  # the kernel ties a child to the thread that forked it: see that end after it

fork("child")
thread = threading.Thread(target=fork, args=("threads-child",))
thread.start()
thread.join()
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "fork server", "workers"])
def test_forked_children_die_with_what_they_hang_on(tmp_path: Path, victim: str) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKING)
    with agent(tmp_path, "script", str(program)) as process:
        start_workers(process)
        logs = [tmp_path / f"worker-{rank}.log" for rank in (0, 1)]
        wait_until(
            lambda: all(log.exists() and log.read_text().count("child") == 3 for log in logs),
            "both workers have forked three processes",
        )
        below = descendants(process.pid)
        (server,) = (pid for pid in below if name_of(pid) == "elastic-fork")
        workers = {pid for pid in descendants(server) if os.getsid(pid) == pid}
        assert (len(below), len(workers)) == (9, 2)

        doomed = {"agent": {process.pid}, "fork server": {server}, "workers": workers}[victim]
        for pid in doomed:
            kill(pid)

        survivors = {server} if victim == "workers" else set()
        wait_until(
            lambda: {pid for pid in below if is_alive(pid)} == survivors, "no descendant of it is alive", 5
        )


def test_frozen_processes_die_with_the_agent_too(tmp_path: Path) -> None:
    with agent(tmp_path, "command", "sleep", "600") as process:
        start_workers(process)
        wait_until(lambda: len(descendants(process.pid)) == 3, "fork server and workers run")
        for pid in (below := descendants(process.pid)):
            os.kill(pid, signal.SIGSTOP)

        process.kill()
        process.wait()

        wait_until(lambda: not any(map(is_alive, below)), "nothing of the agent's is alive", 5)


@pytest.mark.slow
def test_a_child_of_a_thread_outlives_the_thread(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(FORKING)
    with agent(tmp_path, "script", str(program)) as process:
        start_workers(process)
        log = tmp_path / "worker-0.log"
        wait_until(lambda: log.exists() and "threads-child" in log.read_text(), "the thread forked")
        (line,) = (line for line in log.read_text().splitlines() if line.startswith("threads-child"))
        child = int(line.split()[1])
        (worker,) = (
            pid
            for pid in descendants(process.pid)
            if os.getsid(pid) == pid and name_of(pid) == "worker-0" and child in descendants(pid)
        )
        wait_until(lambda: len(list(Path(f"/proc/{worker}/task").iterdir())) == 1, "the thread has ended")

        os.kill(child, signal.SIGUSR1)
        wait_until(lambda: f"alive {child}" in log.read_text(), "the child answers", 10)


@pytest.mark.case("W01")
@pytest.mark.parametrize("delay_ms", range(0, 50, 5))
def test_no_worker_survives_an_agent_killed_while_it_forks(tmp_path: Path, delay_ms: int) -> None:
    with agent(tmp_path, "command", "sleep", "600") as process:
        start_workers(process)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(delay_ms / 1000)

        process.kill()
        process.wait()

        wait_until(lambda: not of_agent(tmp_path), "nothing of the agent's is alive", 5)


def test_no_fork_server_survives_an_agent_killed_while_it_starts(tmp_path: Path) -> None:
    code = AGENT.replace("sys.stdin.readline()", "os.kill(os.getpid(), 9)")
    environment = {**os.environ, "LOGS": str(tmp_path), "TEST_AGENT": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, "command", "sleep", "600"], env=environment, check=False)

    wait_until(lambda: not of_agent(tmp_path), "nothing of the agent's is alive", 5)


@pytest.mark.slow
def test_everything_is_imported_before_a_worker_starts(tmp_path: Path) -> None:
    tmp_path.joinpath("of_the_job.py").write_text("import decimal")
    program = tmp_path / "program.py"
    with Node(entrypoint=Entrypoint("script", str(program)), preload=("of_the_job",)) as node:
        program.write_text("")
        node.program = program
        assert node.warm().notice == ""
        node.run(
            "import sys; print({'torch', 'torch._dynamo', 'of_the_job', 'decimal'} <= sys.modules.keys())"
        )

        assert node.output() == "True\n"


def test_a_module_that_cannot_be_preloaded_is_named_and_left_to_the_workers() -> None:
    with Node(preload=("no_such_module",)) as node:
        notice = node.warm().notice

        assert notice == (
            "preload of 'no_such_module' failed, workers import it themselves: "
            "ModuleNotFoundError: No module named 'no_such_module'"
        )
        assert node.run("import os; os._exit(5)") == 5


@pytest.mark.slow
def test_workers_are_spawned_where_preloading_left_a_thread(tmp_path: Path) -> None:
    with Node(preload=("threaded",)) as node:
        node.directory.joinpath("threaded.py").write_text(
            textwrap.dedent(
                """
                import threading
                threading.Thread(target=threading.Event().wait, daemon=True).start()
                """
            )
        )
        notice = node.warm().notice

        assert notice.startswith("workers are spawned, not forked: preloading left 2 threads (")
        assert node.run("import sys; sys.exit('torch' in sys.modules)") == 0
        assert node.run("import sys; sys.exit(3)") == 3


def test_a_fork_server_that_does_not_get_warm_is_given_up() -> None:
    with Node(preload=("endless",), warm_timeout_s=0.5) as node:
        node.directory.joinpath("endless.py").write_text("import time; time.sleep(600)")
        node.group.warm()

        assert node.wait_for(ForkServerLost).reason == "the fork server was not warm after 0.5 s"


@pytest.mark.slow
def test_no_thread_is_left_by_warming() -> None:
    with Node(preload=("elastic_core.trainer.classy.preload",)) as node:
        assert node.warm().notice == ""


def test_a_fork_server_that_the_system_refuses_is_an_error() -> None:
    big = {"BIG": "x" * 200_000}
    with (
        Node(start_method="spawn", environment=big) as node,
        pytest.raises(OSError, match="Argument list too long"),
    ):
        node.group.warm()


def test_a_process_that_the_system_refuses_is_a_told_failure() -> None:
    with Node(start_method="spawn") as node:
        node.warm()
        node.write("")
        node.group.start([{"BIG": "x" * 200_000}])

        assert node.wait_for(WorkerExited).exit.code == 71
        assert node.failure().message == "cannot start a process: Argument list too long"
