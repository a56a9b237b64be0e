"""The script of these tests in forked processes, and what is asserted of it."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import signal
import socket
import sys
from collections.abc import Mapping
from multiprocessing.context import ForkProcess
from pathlib import Path

import torch

from elastic_core.events.audit import SampleAudit, fold_audit
from elastic_core.events.lines import parse_lines
from tests.elastic_core.agent.node import wait_until

SCRIPT = Path(__file__).parents[3] / "scripts" / "elastic_loop.py"
STEPS = 3 * 7
DEADLINE_S = 60


def program(arguments: list[str], environment: Mapping[str, str], log: Path) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ.update(environment)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)
    sys.argv = [str(SCRIPT), *arguments]
    try:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]  # as the interpreter does
        sys.exit(1)


class Loop:
    """The script in forked processes of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.log = directory / "log"
        self.run_dir = directory / "alone"

    def start(self, *arguments: str, **environment: str) -> ForkProcess:
        process = multiprocessing.get_context("fork").Process(
            target=program, args=([str(self.directory), *arguments], environment, self.log)
        )
        process.start()
        return process

    def ranks(self, world_size: int) -> list[ForkProcess]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        return [self.start(RANK=str(rank), LOCAL_RANK=str(rank), **common) for rank in range(world_size)]

    def finish(self, *processes: ForkProcess) -> list[int | None]:
        for process in processes:
            process.join(DEADLINE_S)
        return [process.exitcode for process in processes]

    def hold(self, step: int) -> Path:
        path = self.directory / f"hold-{step}"
        path.touch()
        return path

    def wait_committed(self, step: int) -> None:
        lines = self.run_dir / "samples" / "node-0-0.jsonl"
        wait_until(lambda: lines.exists() and f'"c":{step}}}' in lines.read_text(), f"step {step}")

    def audit(self) -> SampleAudit:
        return audit_of(self.run_dir)


def audit_of(run_dir: Path) -> SampleAudit:
    files = [parse_lines(path.read_text().splitlines()) for path in (run_dir / "samples").glob("*.jsonl")]
    return fold_audit(files, dataset=50, is_finished=True)


def assert_same_weights(directory: Path, expected: Mapping[str, torch.Tensor]) -> None:
    final = torch.load(directory / "final.pt", weights_only=True)
    for name, tensor in expected.items():
        torch.testing.assert_close(final[name], tensor, rtol=0, atol=1e-12)
