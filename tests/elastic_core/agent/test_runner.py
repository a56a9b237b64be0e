"""The runner: a program sees what Python would give it, and its end is told in full."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.agent.worker_group import Entrypoint, WorkerExited
from tests.elastic_core.agent.node import Node

ARGS = ("--note", "a b", "$HOME", "50%d", "", "\u00fc\n'\"\\", "no utf-8: \udcff")


@pytest.fixture(scope="module", params=["fork", "spawn"])
def node(request: pytest.FixtureRequest) -> Iterator[Node]:
    with Node(args=ARGS, start_method=request.param) as node:
        node.warm()
        yield node


@pytest.fixture(scope="module")
def forked() -> Iterator[Node]:
    with Node(slots=2) as node:
        node.warm()
        yield node


def test_arguments_arrive_byte_for_byte(node: Node) -> None:
    node.run("import sys, json; print(json.dumps(sys.argv))")

    assert json.loads(node.output()) == [str(node.program), *ARGS]


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit()", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('too few labels')", 1),
        ("import os; os._exit(7)", 7),
        ("raise ValueError", 1),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
        ("import os; os.kill(os.getpid(), 15)", -signal.SIGTERM),
        ("import os, time; os.kill(os.getpid(), 2); time.sleep(60)", -signal.SIGINT),
    ],
)
def test_the_exit_code_is_the_programs_own(node: Node, program: str, code: int) -> None:
    assert node.run(program) == code


def test_a_full_disk_takes_the_output_and_not_the_program(node: Node) -> None:
    log = node.logs / "worker-0.log"
    log.unlink(missing_ok=True)
    log.symlink_to("/dev/full")
    try:
        assert (
            node.run("for step in range(3): print(step, flush=True)\nimport sys; sys.stderr.write('x')") == 0
        )
    finally:
        log.unlink()


def test_an_exception_is_told_with_its_text_and_line(node: Node) -> None:
    node.run(
        """
        def load(label):
            raise ValueError(f"bad label {label}")

        load(7)
        """,
        {"ELASTIC_NODE_ID": "node-1.a", "RANK": "5", "LOCAL_RANK": "0"},
    )

    failure = node.failure()
    assert failure.message == "ValueError: bad label 7"
    assert failure.location == f"{node.program}:3"
    assert (failure.node_id, failure.rank, failure.local_rank, failure.exit_code) == ("node-1.a", 5, 0, 1)
    assert (failure.started, failure.consequence) == (False, False)
    assert failure.traceback.splitlines()[1] == f'  File "{node.program}", line 5, in <module>'


def test_the_output_holds_the_traceback_as_python_prints_it(node: Node) -> None:
    node.run("1 / 0")

    assert node.output() == (
        "Traceback (most recent call last):\n"
        f'  File "{node.program}", line 1, in <module>\n'
        "    1 / 0\n    ~~^~~\n"
        "ZeroDivisionError: division by zero\n"
    )


def test_a_syntax_error_is_told_with_its_line(node: Node) -> None:
    code = node.run("import os\nif True print(1)\n")

    failure = node.failure()
    assert (code, failure.location) == (1, f"{node.program}:2")
    assert failure.message.startswith("SyntaxError: ")
    assert "elastic_core" not in node.output()


def test_a_missing_module_is_told_with_the_line_that_imports_it(node: Node) -> None:
    node.run("import os\nimport no_such_module")

    failure = node.failure()
    assert failure.message == "ModuleNotFoundError: No module named 'no_such_module'"
    assert failure.location == f"{node.program}:2"


def test_the_line_of_a_failure_is_the_users_and_not_the_librarys(node: Node) -> None:
    node.run("import json\njson.loads('{')")

    failure = node.failure()
    assert failure.message.startswith("json.decoder.JSONDecodeError: ")
    assert failure.location == f"{node.program}:2"


def test_a_missing_program_is_told_by_its_name(node: Node) -> None:
    node.write("")
    node.program.unlink()
    node.group.start([{}])
    exited = node.wait_for(WorkerExited)

    assert exited.exit.code == 1
    assert str(node.program) in node.failure().message


def test_an_exit_with_a_code_is_told_with_its_line(node: Node) -> None:
    node.run("import sys\nsys.exit(3)")

    failure = node.failure()
    assert (failure.message, failure.exit_code) == ("SystemExit: 3", 3)
    assert failure.location == f"{node.program}:2"


def test_an_interrupt_is_told(node: Node) -> None:
    node.run("import os, time; os.kill(os.getpid(), 2); time.sleep(60)")

    assert (node.failure().message, node.failure().exit_code) == ("KeyboardInterrupt", 130)


@pytest.mark.case("W08")
def test_a_long_message_is_bounded(node: Node) -> None:
    node.run("raise ValueError('x' * 3_000_000)")

    failure = node.failure()
    assert failure.message.endswith("[2998012 cut]")
    assert len(failure.message) < 2_100
    assert len(failure.traceback) < 8_100


def test_the_program_is_main_as_python_would_run_it(node: Node) -> None:
    node.run(
        """
        import __main__, atexit, json, os, sys
        print(json.dumps({
            "name": __name__, "file": __file__, "path": sys.path[0], "cwd": os.getcwd(),
            "is_main": vars(__main__) is globals(), "package": __package__, "spec": __spec__,
            "arguments": sys.orig_argv[1:3],
        }))
        atexit.register(lambda: print(__main__.__name__, __main__.later))
        later = 1
        """
    )

    first, second = node.output().splitlines()
    assert json.loads(first) == {
        "name": "__main__",
        "file": str(node.program),
        "path": str(node.directory),
        "cwd": str(Path.cwd()),
        "is_main": True,
        "package": None,
        "spec": None,
        "arguments": [str(node.program), "--note"],
    }
    assert second == "__main__ 1"


def test_what_main_defines_can_be_sent_to_a_spawned_process(node: Node) -> None:
    code = node.run(
        """
        import multiprocessing, sys
        class Sample:
            def __init__(self, number): self.number = number
        def double(sample): return Sample(2 * sample.number)
        if __name__ == "__main__":
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                sys.exit(pool.map(double, [Sample(21)])[0].number)
        """
    )

    assert code == 42


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_loader_processes_work_as_under_python(forked: Node, method: str) -> None:
    forked.write(
        f"""
        import torch
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self): return 8
            def __getitem__(self, index): return index * index

        if __name__ == "__main__":
            loader = DataLoader(Squares(), num_workers=2, multiprocessing_context="{method}")
            print(torch.cat(list(loader)).tolist())
        """
    )
    forked.group.replace(0, {})

    assert forked.wait_for(WorkerExited).exit.code == 0
    assert forked.output() == "[0, 1, 4, 9, 16, 25, 36, 49]\n"


def test_modules_beside_the_program_are_found(node: Node) -> None:
    node.directory.joinpath("beside.py").write_text("value = 17")

    assert node.run("import sys, beside; sys.exit(beside.value)") == 17


def test_the_process_is_a_session_of_its_own_without_input(node: Node) -> None:
    node.run("import os, sys; print(os.getsid(0) == os.getpid() == os.getpgid(0), repr(sys.stdin.read()))")

    assert node.output() == "True ''\n"


def test_the_environment_is_what_was_given(node: Node) -> None:
    node.run("import os, json; print(json.dumps(dict(os.environ)))", {"RANK": "3", "NOTE": "a=b c"})

    environment = json.loads(node.output())
    ours = ("ELASTIC_AGENT_SOCKET", "ELASTIC_WORKER_LAUNCH", "ELASTIC_SNAPSHOT_MEMORY")
    own = {key: environment.pop(key) for key in ours}
    assert own["ELASTIC_AGENT_SOCKET"] == str(node.group.socket_path)
    assert environment == {
        "LOCAL_RANK": "0",
        "OMP_NUM_THREADS": "1",
        **node.spec.environment,
        "RANK": "3",
        "NOTE": "a=b c",
    }


def test_no_descriptor_of_ours_is_left_open_but_the_memory_for_snapshots(node: Node) -> None:
    node.run(
        """
        import os
        memory = os.environ["ELASTIC_SNAPSHOT_MEMORY"].split(",")
        for name in sorted({*os.listdir("/proc/self/fd")}.difference(memory), key=int):
            try:
                print(name, os.readlink(f"/proc/self/fd/{name}"))
            except FileNotFoundError:
                pass  # the listing's own
        """
    )

    lines = node.output().splitlines()
    assert lines[0] == "0 /dev/null"
    assert not [line for line in lines if "socket:" in line or "pipe:" in line or "memfd:" in line]


def test_signals_are_as_in_a_fresh_process(node: Node) -> None:
    node.run(
        """
        import signal
        print({s.name for s in signal.Signals if signal.getsignal(s) not in (signal.SIG_DFL, None)})
        print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), signal.set_wakeup_fd(-1))
        """
    )

    first, second = node.output().splitlines()
    assert eval(first) == {"SIGINT", "SIGPIPE", "SIGXFSZ"}
    assert second == "set() -1"


def test_no_two_workers_draw_the_same_random_numbers(forked: Node) -> None:
    forked.start(
        """
        import random, numpy, torch
        print(random.random(), numpy.random.random(), torch.rand(1).item(), torch.initial_seed())
        """
    )
    for _ in range(2):
        forked.wait_for(WorkerExited)

    drawn = [forked.output(rank).split() for rank in (0, 1)]
    assert len(drawn[0]) == 4
    assert all(first != second for first, second in zip(*drawn, strict=True))


@pytest.mark.parametrize("threads", ["1", "2"])
def test_torch_has_as_many_threads_as_the_environment_says(forked: Node, threads: str) -> None:
    forked.write("import torch; print(torch.get_num_threads())")
    forked.group.replace(0, {"OMP_NUM_THREADS": threads})
    forked.wait_for(WorkerExited)

    assert forked.output() == f"{threads}\n"


GROUP = """
import os, torch, torch.distributed as dist
dist.init_process_group(
    "gloo",
    init_method=f"file://{os.environ['MEETING']}",
    rank=int(os.environ["RANK"]),
    world_size=int(os.environ["WORLD_SIZE"]),
)
"""


def run_group(node: Node, program: str, meeting: Path) -> None:
    node.start(
        GROUP + program,
        *({"RANK": str(rank), "WORLD_SIZE": "2", "MEETING": str(meeting)} for rank in range(2)),
    )
    for _ in range(2):
        node.wait_for(WorkerExited)


def test_a_failure_after_the_group_was_left_still_counts_as_started(node: Node, tmp_path: Path) -> None:
    environment = {"RANK": "0", "WORLD_SIZE": "1", "MEETING": str(tmp_path / "meeting")}
    node.run(
        GROUP + "try:\n    raise ValueError('bad label')\nfinally:\n    dist.destroy_process_group()\n",
        environment,
    )

    failure = node.failure()
    assert (failure.started, failure.consequence) == (True, False)
    assert "[rank0]: ValueError: bad label" in node.output()


def test_a_collective_broken_by_a_lost_peer_is_a_consequence(forked: Node, tmp_path: Path) -> None:
    run_group(
        forked,
        """
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
while True:
    dist.all_reduce(torch.ones(1))
""",
        tmp_path / "meeting",
    )

    failure = forked.failure()
    assert (failure.rank, failure.started, failure.consequence) == (0, True, True)
    assert failure.location == f"{forked.program}:13"


def test_what_a_user_raises_from_a_broken_collective_is_a_consequence(forked: Node, tmp_path: Path) -> None:
    run_group(
        forked,
        """
if dist.get_rank() == 1:
    os.kill(os.getpid(), 9)
try:
    while True:
        dist.all_reduce(torch.ones(1))
except RuntimeError as error:
    raise SystemError("no step") from error
""",
        tmp_path / "meeting",
    )

    assert (forked.failure().message, forked.failure().consequence) == ("SystemError: no step", True)


def test_the_error_file_is_torchs(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "errors" / "0.json"
    node.run("raise ValueError('bad label 7')", {"TORCHELASTIC_ERROR_FILE": str(path)})

    message = json.loads(path.read_text())["message"]
    assert message["message"] == "ValueError: bad label 7"
    assert message["extraInfo"]["py_callstack"] == node.failure().traceback
    assert int(message["extraInfo"]["timestamp"]) > 1_600_000_000


def test_the_error_file_is_not_an_earlier_workers(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    path.write_text('{"message": "of an earlier worker"}')
    node.run("raise ValueError('bad label 7')", {"TORCHELASTIC_ERROR_FILE": str(path)})

    assert json.loads(path.read_text())["message"]["message"] == "ValueError: bad label 7"


def test_an_error_file_that_torchs_record_wrote_stays(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "0.json"
    node.run(
        """
        from torch.distributed.elastic.multiprocessing.errors import record

        @record
        def main():
            raise ValueError("bad label 7")

        main()
        """,
        {"TORCHELASTIC_ERROR_FILE": str(path)},
    )

    message = json.loads(path.read_text())["message"]
    assert "in wrapper" in message["extraInfo"]["py_callstack"].splitlines()[1]
    assert node.failure().location == f"{node.program}:6"


def test_a_program_that_cannot_reach_the_agent_still_ends_with_its_code(node: Node) -> None:
    assert node.run("import os, sys; os.environ['ELASTIC_AGENT_SOCKET'] = '/none'; sys.exit(4)") == 4
    assert node.heard[-1:] == [event for event in node.heard if isinstance(event, WorkerExited)]


def test_a_module_runs_as_with_minus_m(tmp_path: Path) -> None:
    with Node(entrypoint=Entrypoint("module", "json.tool"), args=("--help",), start_method="spawn") as node:
        node.warm()
        node.group.start([{}])

        assert node.wait_for(WorkerExited).exit.code == 0
        assert "usage: python -m json.tool" in node.output() or "usage: tool.py" in node.output()


def test_a_command_runs_without_python() -> None:
    with Node(
        entrypoint=Entrypoint("command", "sh"), args=("-c", 'echo "$RANK" "$1"; exit 5', "sh", "a  b")
    ) as node:
        node.warm()
        node.group.start([{"RANK": "3"}])

        assert node.wait_for(WorkerExited).exit.code == 5
        assert node.output() == "3 a  b\n"


def test_a_command_that_does_not_exist_is_told() -> None:
    with Node(entrypoint=Entrypoint("command", "no-such-program")) as node:
        node.warm()
        node.group.start([{}])

        assert node.wait_for(WorkerExited).exit.code == 127
        assert node.failure().message.startswith("FileNotFoundError: ")
