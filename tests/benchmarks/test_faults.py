"""The fault matrix: its refusals, its verdict, and a short play on real nodes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.faults import Findings, rows_of
from benchmarks.stage import Step, longest_pause

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.faults", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def steps(*times: float) -> list[Step]:
    return [Step(at=at, number=number, generation=1, world=3) for number, at in enumerate(times)]


def test_a_pause_begins_with_the_last_step_before_the_fault() -> None:
    assert longest_pause(steps(1.0, 2.0, 2.5, 6.5, 7.0), struck_at=2.75, until=7.0) == 4.0
    assert longest_pause(steps(1.0, 2.0, 9.0), struck_at=1.5, until=2.0) == 1.0


def test_a_fault_that_did_not_hold_is_counted_and_told() -> None:
    found = Findings()
    each = found.of("node_kill")
    each.struck, each.pauses, each.wholes = 2, [0.25], [0.5]
    assert found.holds
    each.problems.append("seed 1: not within 30 s: 2 nodes train")
    assert not found.holds
    assert [(row.case, row.n, row.max, row.note) for row in rows_of(found)] == [
        ("node_kill: pause", 1, 0.25, "1 of 2 held"),
        ("node_kill: whole", 1, 0.5, "1 of 2 held"),
    ]


def test_an_unknown_fault_is_refused_with_those_that_there_are() -> None:
    done = run("--faults", "node_kill,meteor")
    assert done.returncode == 2
    assert "--faults: meteor unknown; there are worker_kill, agent_kill" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_play_holds() -> None:
    done = run("--seeds", "1", "--faults", "worker_kill,node_freeze,etcd_restart,sigterm", "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    for fault in ("worker_kill", "node_freeze", "node_freeze undone", "etcd_restart", "sigterm"):
        assert rows[f"{fault}: pause"]["note"] == "1 of 1 held"
        assert rows[f"{fault}: pause"]["max"] < 30
    assert rows["samples missed or repeated"]["max"] == 0
    assert rows["left behind"]["max"] == 0
