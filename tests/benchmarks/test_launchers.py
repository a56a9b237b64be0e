"""Nodes of a measurement die whole, and nobody else does."""

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.launchers import Node

FAMILY = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "300"], start_new_session=True)
if os.fork() == 0:
    os.setsid()
open(os.path.join(os.environ["BENCH_DIRECTORY"], f"up-{os.getpid()}"), "w").close()
time.sleep(300)
"""


def test_a_killed_node_leaves_no_process_behind_and_takes_no_other_along(tmp_path: Path) -> None:
    bystander = subprocess.Popen(["sleep", "300"], env={**os.environ, "BENCH_NODE": "node-0"})
    node = Node("node-0", (sys.executable, "-c", FAMILY), tmp_path, {})
    try:
        deadline = time.monotonic() + 30
        while len(list(tmp_path.glob("up-*"))) < 2 or len(node.pids()) < 3:
            assert time.monotonic() < deadline
        before = time.time()
        began = node.kill()
        assert before <= began <= time.time()
        assert node.pids() == []
        assert bystander.poll() is None
    finally:
        node.kill()
        bystander.kill()
        bystander.wait()
