"""The worker group: its workers start, are heard, are stopped, and leave nothing behind."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.agent.worker_group import (
    Entrypoint,
    ForkServerLost,
    ForkServerWarmed,
    WorkerEvent,
    WorkerExited,
    WorkerGroup,
    WorkerSaid,
    WorkerSpec,
    WorkersStopped,
)
from elastic_core.clock import SystemClock
from elastic_core.model.messages import (
    GroupBroken,
    LeaveGeneration,
    StopTraining,
    WorkerAttached,
    WorkerFailed,
)
from tests.elastic_core.agent.node import Node, descendants, is_alive, kill, state_of, wait_until

ENDLESS = "import time; print('here', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def pair() -> Iterator[Node]:
    """Two workers on a warm fork server, used by one test after the other."""
    with Node(slots=2) as node:
        node.warm()
        yield node


@pytest.fixture(autouse=True)
def nothing_runs_on(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        node = request.getfixturevalue("pair")
        node.group.stop(0)
        node.wait_for(WorkersStopped)


def test_each_worker_gets_its_own_environment_and_log(pair: Node) -> None:
    pair.start("import os; print(os.environ['LOCAL_RANK'], os.environ['RANK'])", {"RANK": "6"}, {"RANK": "7"})
    ends = sorted(pair.wait_for(WorkerExited).exit.local_rank for _ in range(2))

    assert ends == [0, 1]
    assert [pair.output(rank) for rank in (0, 1)] == ["0 6\n", "1 7\n"]


@pytest.mark.slow
def test_what_a_worker_said_comes_before_its_exit(pair: Node) -> None:
    for _ in range(10):
        pair.write("import sys; sys.exit(3)")
        pair.group.replace(1, {})
        exited = pair.wait_for(WorkerExited)

        assert (exited.exit.local_rank, exited.exit.code) == (1, 3)
        said = [event for event in pair.heard if isinstance(event, WorkerSaid)]
        assert [event.local_rank for event in said] == [1]
        assert isinstance(said[0].message, WorkerFailed)


def test_what_a_worker_said_comes_before_its_exit_however_late_they_are_read(tmp_path: Path) -> None:
    """While the group's thread is held up in a call, both arrive; then it sees both at once."""
    held, go_on = threading.Event(), threading.Event()
    heard: queue.Queue[WorkerEvent] = queue.Queue()

    def hear(event: WorkerEvent) -> None:
        heard.put(event)
        held.set()
        assert go_on.wait(60)

    program = tmp_path / "program.py"
    program.write_text("import os, sys\nwhile not os.path.exists(__file__ + '.go'): pass\nsys.exit(3)")
    spec = WorkerSpec(
        slots=1,
        api="torchrun",
        entrypoint=Entrypoint("script", str(program)),
        start_method="spawn",
        environment=dict(os.environ),
    )
    group = WorkerGroup(spec=spec, events=hear, socket_dir=tmp_path, clock=SystemClock())
    group.warm()
    assert held.wait(60)
    before = descendants(os.getpid())
    group.start([{}])
    wait_until(lambda: len(descendants(os.getpid()) - before) == 1, "the worker runs")
    (worker,) = descendants(os.getpid()) - before
    Path(f"{program}.go").touch()
    wait_until(lambda: state_of(worker) == "", "the worker has ended and is reaped")
    go_on.set()

    events = [heard.get(timeout=60) for _ in range(3)]
    group.close()
    assert [type(event) for event in events] == [ForkServerWarmed, WorkerSaid, WorkerExited]


def test_a_worker_that_ends_alone_is_told_while_the_others_run(pair: Node) -> None:
    pair.start(
        """
        import os, sys, time
        if os.environ["LOCAL_RANK"] == "0":
            sys.exit(0)
        time.sleep(600)
        """
    )

    exited = pair.wait_for(WorkerExited)
    assert (exited.exit.local_rank, exited.exit.code) == (0, 0)
    with pytest.raises(ValueError, match="local rank 1 has not ended"):
        pair.group.replace(1, {})


def test_a_single_worker_is_replaced(pair: Node) -> None:
    pair.start(ENDLESS)
    pair.wait_for_output("here", 0)
    pair.wait_for_output("here", 1)
    kill(pair.worker_pid(1))
    assert pair.wait_for(WorkerExited).exit.code == -9

    pair.group.replace(1, {"NOTE": "second"})
    wait_until(lambda: pair.output(1).count("here") == 2, "the log holds both workers' lines")


def test_workers_are_not_started_over_others(pair: Node) -> None:
    pair.start(ENDLESS)

    with pytest.raises(ValueError, match="local rank 0 has not ended: wait for its exit"):
        pair.group.start([{}, {}])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_each_slot_needs_an_environment(pair: Node, count: int) -> None:
    with pytest.raises(ValueError, match=f"{count} environments for 2 slots"):
        pair.group.start([{}] * count)


def test_a_rank_that_is_no_slot_is_refused(pair: Node) -> None:
    with pytest.raises(ValueError, match=r"local rank 2 is not in 0\.\.1"):
        pair.group.replace(2, {})


def test_sigterm_reaches_the_main_process_only(pair: Node) -> None:
    pair.start(
        """
        import os, signal, sys, time
        child = os.fork()
        name = "trainer" if child else "loader"
        def save(*_):
            os.write(1, f"{name} terminated\\n".encode())
            if child:
                os.kill(child, 0)  # the loader still serves the last save
                sys.exit(0)
        signal.signal(signal.SIGTERM, save)
        os.write(1, f"{name} {os.getpid()} here\\n".encode())
        time.sleep(600)
        """
    )
    for rank in (0, 1):
        wait_until(lambda rank=rank: pair.output(rank).count("here") == 2, "both processes run")
    loaders = [int(line.split()[1]) for line in pair.output().splitlines() if line.startswith("loader")]

    pair.group.stop(30)
    pair.wait_for(WorkersStopped)

    assert [event.exit.code for event in pair.heard if isinstance(event, WorkerExited)] == [0, 0]
    assert [pair.output(rank).count("trainer terminated") for rank in (0, 1)] == [1, 1]
    assert [pair.output(rank).count("loader terminated") for rank in (0, 1)] == [0, 0]
    wait_until(lambda: not any(map(is_alive, loaders)), "the loader died with its trainer")


STUBBORN = """
import signal, time
signal.signal(signal.SIGTERM, lambda *_: print("no", flush=True))
print("here", flush=True)
while True:
    time.sleep(600)
"""


def test_who_ignores_the_grace_is_killed(pair: Node) -> None:
    pair.start(STUBBORN)
    for rank in (0, 1):
        pair.wait_for_output("here", rank)

    pair.group.stop(0.2)
    pair.wait_for(WorkersStopped)

    assert [event.exit.code for event in pair.heard if isinstance(event, WorkerExited)] == [-9, -9]
    assert [pair.output(rank) for rank in (0, 1)] == ["here\nno\n"] * 2


def test_a_second_stop_shortens_the_grace(pair: Node) -> None:
    pair.start(STUBBORN)
    for rank in (0, 1):
        pair.wait_for_output("here", rank)

    pair.group.stop(600)
    pair.wait_for_output("no")
    pair.group.stop(0)
    pair.wait_for(WorkersStopped)

    assert pair.output() == "here\nno\n"


def test_a_second_stop_does_not_lengthen_the_grace(pair: Node) -> None:
    pair.start(STUBBORN)
    for rank in (0, 1):
        pair.wait_for_output("here", rank)

    pair.group.stop(0.2)
    pair.group.stop(600)

    pair.wait_for(WorkersStopped)


def test_a_frozen_worker_is_ended(pair: Node) -> None:
    pair.start("import os; print('here', flush=True); os.kill(os.getpid(), 19)")
    for rank in (0, 1):
        wait_until(lambda rank=rank: state_of(pair.worker_pid(rank)) == "T", "the worker is frozen")

    pair.group.stop(0.1)
    pair.wait_for(WorkersStopped)

    assert [event.exit.code for event in pair.heard if isinstance(event, WorkerExited)] == [-9, -9]


def test_a_stop_without_workers_is_answered(pair: Node) -> None:
    pair.group.stop(30)

    pair.wait_for(WorkersStopped)


def test_a_dead_workers_programs_are_ended_whatever_their_session(pair: Node) -> None:
    pair.write(
        """
        import os, subprocess, sys
        for fresh in (False, True):
            child = subprocess.Popen(["sleep", "600"], start_new_session=fresh)
            print(child.pid, flush=True)
        os._exit(0)
        """
    )
    pair.group.replace(0, {})
    pair.wait_for(WorkerExited)

    left = [int(line) for line in pair.output().split()]
    assert len(left) == 2
    wait_until(lambda: not any(map(is_alive, left)), "what the worker left behind has ended")


def test_a_living_workers_orphans_live_on(pair: Node) -> None:
    pair.start(
        """
        import subprocess, time
        command = "setsid sleep 600 > /dev/null & echo $!"
        print(subprocess.check_output(["sh", "-c", command], text=True), flush=True)
        time.sleep(600)
        """
    )
    wait_until(lambda: all(pair.output(rank) for rank in (0, 1)), "both workers have started a helper")
    helpers = [int(pair.output(rank)) for rank in (0, 1)]

    kill(pair.worker_pid(0))
    pair.wait_for(WorkerExited)

    wait_until(lambda: not is_alive(helpers[0]), "the dead worker's helper has ended")
    assert is_alive(helpers[1])


@pytest.mark.case("D05")
@pytest.mark.slow
def test_two_hundred_children_left_by_a_worker_are_reaped(pair: Node) -> None:
    pair.write(
        """
        import os, subprocess
        for _ in range(200):  # nothing binds them to the worker: they are found and killed as orphans
            subprocess.Popen(["sleep", "600"])
        os._exit(0)
        """
    )
    pair.group.replace(0, {})
    pair.wait_for(WorkerExited)

    server = pair.server_pid()
    wait_until(lambda: not descendants(server), "no child of the worker is left, zombies included", 10)


@pytest.mark.case("W09")
def test_megabytes_in_one_line_neither_block_nor_get_lost(pair: Node) -> None:
    pair.write("print('x' * 5_000_000); print('end')")
    pair.group.replace(0, {})

    assert pair.wait_for(WorkerExited).exit.code == 0
    assert len(pair.output()) == 5_000_005
    assert pair.group.log_tail(0, 1) == "end"
    assert len(pair.group.log_tail(0)) < 70_000


def test_the_tail_of_a_log_is_its_last_lines(pair: Node) -> None:
    pair.write("for line in range(100): print(line)")
    pair.group.replace(0, {})
    pair.wait_for(WorkerExited)

    assert pair.group.log_tail(0, 3) == "97\n98\n99"
    assert pair.group.log_tail(1) == ""


TALKER = """
import os, sys
from elastic_core.channel import AgentLink
from elastic_core.model.messages import GroupBroken, WorkerAttached
link = AgentLink.connect()
link.send(WorkerAttached(local_rank=int(os.environ["LOCAL_RANK"]), pid=os.getpid()))
while True:
    message = link.receive(60)
    link.send(GroupBroken(generation=7, step=11, error=repr(message)))
"""


def test_attached_workers_are_sent_to_and_heard(pair: Node) -> None:
    pair.start(TALKER)
    for _ in range(2):
        pair.wait_for(WorkerSaid, lambda event: isinstance(event.message, WorkerAttached))
    message = LeaveGeneration(generation=3)

    pair.group.send(message)

    answers = [pair.wait_for(WorkerSaid) for _ in range(2)]
    assert sorted(answer.local_rank for answer in answers) == [0, 1]
    assert {answer.message for answer in answers} == {GroupBroken(generation=7, step=11, error=repr(message))}


def test_a_worker_that_does_not_read_holds_up_nobody(pair: Node) -> None:
    pair.start(
        TALKER.replace("while True:", "while os.environ['LOCAL_RANK'] == '1':") + "os.kill(os.getpid(), 19)"
    )
    for _ in range(2):
        pair.wait_for(WorkerSaid, lambda event: isinstance(event.message, WorkerAttached))
    message = StopTraining(save=True, reason="x" * 100_000)

    for _ in range(100):
        pair.group.send(message)
        assert pair.wait_for(WorkerSaid).local_rank == 1


def test_a_leftovers_word_is_not_taken_for_the_successors(pair: Node) -> None:
    pair.write(TALKER)
    pair.group.replace(0, {})
    pair.wait_for(WorkerSaid)
    kill(pair.worker_pid(0))
    pair.wait_for(WorkerExited)
    pair.write(
        """
        import os
        from elastic_core.channel import WORKER_LAUNCH, AgentLink
        from elastic_core.model.messages import WorkerReady
        own = int(os.environ[WORKER_LAUNCH])
        for number in (own - 1, "", "nonsense", own):
            AgentLink.connect({**os.environ, WORKER_LAUNCH: str(number)}).send(WorkerReady())
        """
    )

    pair.group.replace(0, {})
    pair.wait_for(WorkerExited)

    assert [type(event) for event in pair.heard] == [WorkerSaid, WorkerExited]


def test_workers_asked_for_before_the_fork_server_is_warm_start_then() -> None:
    with Node(start_method="spawn") as node:
        node.start("print('here')")
        node.group.warm()

        assert node.wait_for(WorkerExited).exit.code == 0
        assert isinstance(node.heard[0], ForkServerWarmed)


def test_a_stop_forgets_workers_that_wait_for_the_fork_server() -> None:
    with Node(start_method="spawn") as node:
        node.start("print('here')")
        node.group.stop(30)
        node.wait_for(WorkersStopped)
        node.warm()

        assert [type(event) for event in node.heard] == [WorkersStopped, ForkServerWarmed]
        assert node.output() == ""


@pytest.mark.slow
@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_lost_fork_server_is_told_and_replaced(start_method: str) -> None:
    with Node(slots=2, start_method=start_method) as node:
        node.warm()
        node.start(ENDLESS)
        for rank in (0, 1):
            node.wait_for_output("here", rank)
        workers = [node.worker_pid(rank) for rank in (0, 1)]

        kill(node.server_pid())
        lost = node.wait_for(ForkServerLost)

        assert not any(map(is_alive, workers))
        assert lost.reason == "the fork server was killed by signal 9"
        ends = [event.exit for event in node.heard if isinstance(event, WorkerExited)]
        assert [(end.pid, end.code) for end in ends] == [(pid, -9) for pid in workers]
        node.warm()
        assert node.run_all("print('again')") == [0, 0]


def test_a_frozen_fork_server_does_not_keep_workers_alive() -> None:
    with Node(start_method="spawn") as node:
        node.warm()
        node.start(ENDLESS)
        node.wait_for_output("here")
        worker = node.worker_pid(0)
        os.kill(node.server_pid(), 19)

        node.group.stop(0)
        node.wait_for(WorkersStopped)

        assert not is_alive(worker)
        assert [type(event) for event in node.heard[-3:]] == [WorkerExited, ForkServerLost, WorkersStopped]
        assert node.heard[-2] == ForkServerLost(
            reason="the fork server did not end its workers in 2 s and was killed"
        )


def test_close_leaves_neither_process_nor_socket() -> None:
    with Node(slots=2, start_method="spawn") as node:
        node.warm()
        node.start(
            "import subprocess, time; subprocess.Popen(['sleep', '600']); print('here'); time.sleep(600)"
        )
        for rank in (0, 1):
            node.wait_for_output("here", rank)
        below = {node.server_pid(), *descendants(node.server_pid())}
        assert len(below) == 5

        node.group.close()

        assert not any(map(is_alive, below))
        assert not node.group.socket_path.exists()


def test_close_ends_a_fork_server_that_still_warms() -> None:
    node = Node()
    node.group.warm()
    server = node.server_pid()

    with node:
        pass

    assert not is_alive(server)


def test_a_socket_path_too_long_for_the_kernel_is_refused() -> None:
    directory = Path("/tmp", "d" * 120)
    spec = WorkerSpec(slots=1, api="elastic", entrypoint=Entrypoint("script", "x.py"))

    with pytest.raises(ValueError, match="is over 107 bytes: use a shorter directory"):
        WorkerGroup(spec=spec, events=lambda _: None, socket_dir=directory, clock=SystemClock())
