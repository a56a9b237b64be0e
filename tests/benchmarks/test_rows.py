"""A report is read by people at any width, and by programs as JSON."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRINT = """
from benchmarks.rows import Row, print_report
rows = [Row.of([0.00123, 1234.5, 7.0], peer=peer, case=f"case {number} of a rather long name", unit="ms",
               note="a note that says much more than would ever fit beside all those numbers in a row")
        for peer in ("elastic-train", "torchrun") for number in (1, 2)]
print_report(rows, "-")
"""


def run(columns: int | None = None) -> tuple[str, str]:
    """Return standard output, and what is seen beside it: in a file, or on a terminal of some width."""
    command = [sys.executable, "-c", PRINT]
    if columns is None:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout, done.stderr
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    with os.fdopen(ours, "rb", buffering=0) as screen:
        done = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=theirs, env=environment, text=True, check=True
        )
        os.close(theirs)
        seen = screen.read(1 << 20).decode()
    return done.stdout, re.sub(r"\x1b\[[0-9;]*m", "", seen)


def test_numbers_stand_in_one_line_beside_their_case_on_a_narrow_terminal_and_in_a_file() -> None:
    for columns in (60, 80, 200, None):
        _, table = run(columns)
        lines = table.splitlines()
        assert sum("0.00123" in line and "1234" in line and "ms" in line for line in lines) == 4, columns
        assert all(len(line) <= columns for line in lines if columns)
        assert [line.strip() for line in lines if line.strip() in ("elastic-train", "torchrun")] == [
            "elastic-train",
            "torchrun",
        ]


def test_a_file_has_each_note_in_one_line() -> None:
    _, table = run()
    assert (
        table.count("a note that says much more than would ever fit beside all those numbers in a row") == 4
    )


def test_standard_output_holds_nothing_but_json() -> None:
    report = json.loads(run()[0])
    assert [row["case"] for row in report["rows"]][:2] == [
        "case 1 of a rather long name",
        "case 2 of a rather long name",
    ]
    assert report["rows"][0]["median"] == 7.0
    assert report["machine"]["cores"] >= 1
