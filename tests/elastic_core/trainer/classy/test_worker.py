from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_core.channel import LineBuffer, to_line
from elastic_core.errors import RefusedInput
from elastic_core.ids import NodeId
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Assignment, Cause, Generation
from elastic_core.model.messages import EnterGeneration, decode_worker_message
from elastic_core.trainer.__main__ import main
from elastic_core.trainer.classy.export import load_exported
from elastic_core.trainer.classy.solo import SoloReducer, train_alone
from elastic_core.trainer.classy.worker import build_trainee
from tests.elastic_core.trainer.classy.conftest import make_trainee, small_config

NODE = NodeId("node-1.a")
WAIT_S = 60.0


class FakeAgent:
    """An agent's end of the socket: puts its one worker into a generation of one as soon as it is ready."""

    def __init__(self, directory: Path, job: dict[str, Any], attempt: int = 0) -> None:
        self.run_dir = directory / "run"
        self.run_dir.mkdir(exist_ok=True)
        job_file = directory / "job.json"
        job_file.write_text(JobSpec.model_validate(job).model_dump_json())
        self._listener = socket.socket(socket.AF_UNIX)
        path = directory / f"agent-{attempt}.sock"
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(WAIT_S)
        self.environment = {
            **os.environ,
            "ELASTIC_AGENT_SOCKET": str(path),
            "ELASTIC_WORKER_LAUNCH": "1",
            "ELASTIC_NODE_ID": NODE,
            "ELASTIC_RUN_DIR": str(self.run_dir),
            "ELASTIC_JOB": str(job_file),
            "ELASTIC_ATTEMPT": str(attempt),
            "LOCAL_RANK": "0",
            "OMP_NUM_THREADS": "1",
        }
        self.heard: list[Any] = []

    def run(self, *, stop_at_step: int = -1) -> int:
        """Start the worker, follow it to its end and return its exit code."""
        command = [sys.executable, "-m", "elastic_core.trainer", "run"]
        worker = subprocess.Popen(command, env=self.environment)
        try:
            connection, _ = self._listener.accept()
            connection.settimeout(WAIT_S)
            with connection:
                self._follow(connection, worker, stop_at_step)
            return worker.wait(timeout=WAIT_S)
        finally:
            worker.kill()
            worker.wait()
            self._listener.close()

    def _follow(self, connection: socket.socket, worker: subprocess.Popen[bytes], stop_at_step: int) -> None:
        lines = LineBuffer()
        while data := connection.recv(1 << 16):
            for line in lines.feed(data):
                if line == b"1":  # which launch it is
                    continue
                message = decode_worker_message(line)
                self.heard.append(message)
                if message.kind == "worker_ready":
                    connection.sendall(to_line(self._generation()))
                if message.kind == "progress_made" and message.progress.step == stop_at_step:
                    worker.send_signal(signal.SIGTERM)

    @staticmethod
    def _generation() -> EnterGeneration:
        generation = Generation(
            number=1,
            cause=Cause.START,
            restart_count=0,
            world_size=1,
            group_world_size=1,
            master_address="127.0.0.1",
            master_port=1,
        )
        assignment = Assignment(number=1, node_id=NODE, group_rank=0, first_rank=0, slots=1)
        return EnterGeneration(generation=generation, assignment=assignment)


def job_of(**training: Any) -> dict[str, Any]:
    elastic = {"global_batch": 32, "virtual_shards": 4}
    return {"training": {"kind": "classy", "config": small_config(), "elastic": elastic, **training}}


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_worker_trains_as_the_solo_run_does_and_a_finished_one_has_nothing_to_do(tmp_path: Path) -> None:
    agent = FakeAgent(tmp_path, job_of())
    assert agent.run() == 0
    finished = agent.heard[-1].result
    assert (finished.epochs, finished.steps, finished.samples) == (2, 6, 148)

    train_alone(build_trainee(JobSpec.model_validate(job_of()), tmp_path), tmp_path / "solo")
    losses = [line["metrics"]["loss"] for line in metrics(agent.run_dir) if "metrics" in line]
    assert losses == [line["loss"] for line in metrics(tmp_path / "solo")]
    weights = torch.load(agent.run_dir / "model" / "model.pt", weights_only=True)
    for name, tensor in torch.load(tmp_path / "solo" / "model" / "model.pt", weights_only=True).items():
        assert torch.equal(weights[name], tensor), name

    again = FakeAgent(tmp_path, job_of(), attempt=1)
    assert again.run() == 0
    assert again.heard[-1].result == finished
    assert len(metrics(agent.run_dir)) == len(losses) + 2, "no step was done again"


@pytest.mark.slow
def test_a_worker_that_gets_sigterm_saves_and_the_next_one_goes_on(tmp_path: Path) -> None:
    job = job_of(config=small_config(num_epochs=400))
    agent = FakeAgent(tmp_path, job)
    assert agent.run(stop_at_step=1) == 75
    left = agent.heard[-1]
    assert left.kind == "generation_left"
    assert left.saved
    again = FakeAgent(tmp_path, job, attempt=1)
    assert again.run(stop_at_step=left.step + 1) == 75
    resumed = next(message.resumption for message in again.heard if message.kind == "steps_resumed")
    assert (resumed.step_resumed, resumed.source) == (left.step, "checkpoint")


def test_solo_prints_the_accuracy_and_writes_the_model(tmp_path: Path, capsys: Any) -> None:
    job_file = tmp_path / "job.yaml"
    job_file.write_text(json.dumps(job_of()))
    assert main(["solo", str(job_file), "--run-dir", str(tmp_path / "run")]) == 0
    accuracy = json.loads((tmp_path / "run" / "model" / "config.json").read_text())["metrics"][
        "test_accuracy"
    ]
    assert f"test_accuracy={accuracy:.4f}" in capsys.readouterr().out
    assert len(metrics(tmp_path / "run")) == 6


def test_an_exported_model_classifies_as_the_trained_one(tmp_path: Path) -> None:
    trainee = make_trainee()
    trainee.train_step(SoloReducer())
    exported = load_exported(Path(trainee.export(tmp_path / "model")))
    images = torch.stack([trainee.task.datasets["test"][index]["input"] for index in range(5)])
    with torch.no_grad():
        assert torch.equal(exported.model(images), trainee.task.base_model.eval()(images))
    assert exported.classes == tuple("0123456789")
    assert exported.transform is None
    assert exported.metrics["steps"] == 1


def test_a_directory_without_an_export_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match="holds no exported model"):
        load_exported(tmp_path)
