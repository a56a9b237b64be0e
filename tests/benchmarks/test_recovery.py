"""The recovery benchmark: its rows, its refusals, and one real measurement."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.diary import Recovery
from benchmarks.recovery import rows_of

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.recovery", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_what_did_not_recover_counts_with_the_limit_and_is_told() -> None:
    back = Recovery(
        seconds=2.0, next_step=1.5, pause=1.25, redone=10, milestones={"begun": 0.5, "formed": 1.0}
    )
    rows = list(rows_of("torchrun", "worker_kill", [back, None, back], 90.0))
    first, *others = rows
    assert (first.case, first.n, first.min, first.median, first.max) == ("worker_kill", 3, 2.0, 2.0, 90.0)
    assert first.note == "2 of 3 recovered within 90 s; begun 0.50; formed 1.00"
    assert [(row.case, row.n, row.median, row.unit) for row in others] == [
        ("worker_kill next step", 2, 1.5, "s"),
        ("worker_kill pause", 2, 1.25, "s"),
        ("worker_kill redone", 2, 10, "steps"),
    ]


def test_a_peer_that_never_recovers_has_one_row() -> None:
    (row,) = rows_of("torchrun", "node_kill", [None, None], 30.0)
    assert (row.n, row.median, row.note) == (2, 30.0, "0 of 2 recovered within 30 s")


def test_an_unknown_peer_is_refused_with_those_that_there_are() -> None:
    done = run("--peers", "torchrun,slurm")
    assert done.returncode == 2
    assert "--peers: slurm unknown; there are torchrun, torchrun-noshare" in done.stderr


@pytest.mark.slow
def test_a_killed_worker_of_our_trainer_costs_no_step() -> None:
    done = run("--peers", "elastic-api", "--faults", "worker_kill", "--runs", "1", "--json", "-")
    assert done.returncode == 0, done.stderr
    rows = {row["case"]: row for row in json.loads(done.stdout)["rows"]}
    assert rows["worker_kill"]["note"].startswith("1 of 1 recovered")
    assert rows["worker_kill redone"]["max"] <= 1
