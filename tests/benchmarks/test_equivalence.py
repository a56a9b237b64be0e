from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.equivalence import GOAL, NODES, STEPS, random_trace


@pytest.mark.parametrize("seed", range(200))
def test_a_trace_is_one_that_can_happen_and_the_same_every_time(seed: int) -> None:
    trace = random_trace(seed)
    assert trace == random_trace(seed)
    assert [attempt.is_lost for attempt in trace] == [True] * (len(trace) - 1) + [False]
    for attempt in trace:
        members = set(attempt.members)
        for event in attempt.events:
            assert 0 < event.step < STEPS
            assert (event.node in members) is (event.kind in ("drain", "kill"))
            members ^= {event.node} if event.kind != "restart" else members
            assert len(members) <= NODES
            assert members or event.kind == "restart"


@pytest.mark.case("S08")
@pytest.mark.slow
def test_random_traces_give_the_model_of_an_undisturbed_training(tmp_path: Path) -> None:
    """Mixup and label smoothing, each in default and in deterministic mode."""
    path = tmp_path / "rows.json"
    command = [sys.executable, "-m", "benchmarks.equivalence", "--traces=4", f"--json={path}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    rows = {(row["peer"], row["case"]): row["max"] for row in json.loads(path.read_text())["rows"]}
    assert rows["default", "largest difference of a weight"] <= GOAL
    assert rows["deterministic", "largest difference of a weight"] == 0
    for peer in ("default", "deterministic"):
        assert rows[peer, "samples missed"] == rows[peer, "samples repeated"] == 0
