"""Processes that outlive their starter are found by what they carry."""

import os
import signal
import sys
from pathlib import Path

from tasks.process import carrying, spawn

FILLING = {f"FILLING_{number}": "x" * 100 for number in range(100)}
"""It takes the kernel a moment to hand these over."""


def test_a_process_is_found_by_its_mark_as_soon_as_it_was_started(tmp_path: Path) -> None:
    for number in range(20):
        mark = f"{tmp_path}/{number}"
        pid = spawn(
            [sys.executable, "-c", "import time; time.sleep(60)"],
            environment={**FILLING, "MARK": mark},
            log=tmp_path / "log",
        )
        try:
            assert f"MARK={mark}" in Path(f"/proc/{pid}/environ").read_text()
            assert [process.pid for process in carrying("MARK", mark)] == [pid]
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
