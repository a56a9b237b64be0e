"""Where a worker stands, from the stacks that it wrote."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.agent.process import STACK_FILE
from elastic_core.agent.stacks import dump_stacks, is_stopped, place_of
from tests.elastic_core.agent.node import Node, wait_until

BLOCKED = """
import select, sys

def load_batch():
    print("here", flush=True), select.select([], [], [])

load_batch()
"""


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    environment = {**os.environ, STACK_FILE: str(tmp_path / "stacks")}
    with Node(environment=environment) as node:
        node.warm()
        yield node


def start(node: Node, text: str) -> int:
    node.start(text)
    node.wait_for_output("here")
    wait_until(lambda: bool(node.group.processes()), "its process is known")
    return node.group.processes()[0]


def test_a_worker_that_is_blocked_in_c_code_says_where(node: Node, tmp_path: Path) -> None:
    pid = start(node, BLOCKED)
    stacks = dump_stacks(pid, tmp_path / "stacks")
    assert place_of(stacks) == f"{node.program}:5"
    assert "in load_batch" in stacks
    assert node.group.processes() == {0: pid}, "asking ended nothing"


def test_a_stopped_worker_is_continued_to_say_where(node: Node, tmp_path: Path) -> None:
    pid = start(node, BLOCKED)
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(pid), "it is stopped")
    assert place_of(dump_stacks(pid, tmp_path / "stacks")) == f"{node.program}:5"


def test_a_program_that_is_no_python_is_not_killed_by_the_question(tmp_path: Path) -> None:
    assert dump_stacks(os.getpid(), tmp_path / "stacks") == ""


def test_the_innermost_frame_of_the_users_own_code_is_the_place() -> None:
    library = os.path.join(os.path.dirname(os.__file__), "selectors.py")  # noqa: PTH118, PTH120
    stacks = f"""Thread 0x1 (most recent call first):
  File "/home/me/other.py", line 1 in run

Current thread 0x2 (most recent call first):
  File "{library}", line 5 in select
  File "/home/me/train.py", line 40 in step
  File "/home/me/train.py", line 90 in <module>
"""
    assert place_of(stacks) == "/home/me/train.py:40"
    assert place_of("") == ""
