from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_core.trainer.classy.solo import SoloReducer
from tests.elastic_core.trainer.classy.conftest import make_trainee

pytestmark = pytest.mark.slow


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def train_over_gloo(size: int, directory: Path) -> list[dict[str, Any]]:
    module = "tests.elastic_core.trainer.classy.gloo_ranks"
    ranks = subprocess.Popen(
        [sys.executable, "-m", module, str(size), str(free_port()), str(directory)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        assert ranks.wait(timeout=100) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(ranks.pid, signal.SIGKILL)
        ranks.wait()
    return [torch.load(directory / f"{rank}.pt", weights_only=True) for rank in range(size)]


def train_alone(mode: str) -> dict[str, Any]:
    trainee = make_trainee(deterministic=mode == "deterministic")
    while trainee.step < trainee.total_steps:
        trainee.train_step(SoloReducer())
    trainee.evaluate(SoloReducer())
    return trainee.state_dict()


def test_real_ranks_hold_the_same_state_and_equal_the_solo_run(tmp_path: Path) -> None:
    ranks = train_over_gloo(3, tmp_path)
    for mode, tolerance in (("plain", 1e-5), ("deterministic", 0.0)):
        alone, states = train_alone(mode), [rank[mode] for rank in ranks]
        assert [state["step"] for state in states] == [6, 6, 6]
        for name, tensor in alone["model"].items():
            assert torch.equal(states[0]["model"][name], states[2]["model"][name]), name
            assert (states[0]["model"][name] - tensor).abs().max() <= tolerance, name
        assert states[0]["figures"] == states[1]["figures"] == states[2]["figures"]
        assert states[0]["figures"]["test_accuracy"] == alone["figures"]["test_accuracy"]
