"""What the agent costs a steady training.

    python -m benchmarks.overhead [--steps 500] [--runs 5] [--workers 2] [--json PATH|-]

The same script, DDP on gloo at full speed, runs under the agent (`elastic-agent --standalone`,
with an etcd of its own), under torchrun (`--standalone`), and bare: its workers are started by
hand with torchrun's variables. They take turns, so that whatever else the machine does meets all
of them. A run is the median of its steps; the last rows are each run beside the bare one before
it, in percent.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.launchers import ROOT
from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from elastic_core.store.server import free_port

SCRIPT = ROOT / "benchmarks" / "scripts" / "steady_steps.py"
TIMEOUT_S = 600.0

Run = Callable[[tuple[str, ...], int], None]


def bare(program: tuple[str, ...], workers: int) -> None:
    """Run the workers by themselves."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    started = [
        subprocess.Popen(
            [sys.executable, *program],
            env={**_environment(), **place, "RANK": str(rank), "WORLD_SIZE": str(workers)},
        )
        for rank in range(workers)
    ]
    try:
        codes = [process.wait(TIMEOUT_S) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    if any(codes):
        raise RuntimeError(f"bare workers ended with {codes}")


def agent(program: tuple[str, ...], workers: int) -> None:
    """Run them under our agent."""
    _launch("elastic_core.agent", program, workers)


def torchrun(program: tuple[str, ...], workers: int) -> None:
    """Run them under torch's agent."""
    _launch("torch.distributed.run", program, workers)


PEERS: dict[str, Run] = {"bare": bare, "elastic-train": agent, "torchrun": torchrun}


def main() -> None:
    """Measure and report."""
    arguments = _parse()
    log_to_stderr()
    facts = machine_facts()
    taken: dict[str, list[float]] = {name: [] for name in PEERS}
    for _ in range(arguments.runs):
        for name, run in PEERS.items():
            taken[name].append(measure(run, arguments.steps, arguments.workers))
    rows = [
        Row.of(medians, peer=name, case=f"step of {arguments.workers} workers", unit="ms")
        for name, medians in taken.items()
    ]
    for name in list(PEERS)[1:]:
        pairs = zip(taken[name], taken["bare"], strict=True)
        more = [(with_it / without - 1) * 100 for with_it, without in pairs]
        rows.append(Row.of(more, peer=name, case="more than bare", unit="%"))
    print_report(rows, arguments.json, facts=facts)


def measure(run: Run, steps: int, workers: int) -> float:
    """Return the median of a run's steps in milliseconds."""
    with tempfile.TemporaryDirectory(prefix="overhead-") as directory:
        path = Path(directory) / "steps.json"
        run((str(SCRIPT), str(path), str(steps)), workers)
        return statistics.median(json.loads(path.read_text()))


def _launch(module: str, program: tuple[str, ...], workers: int) -> None:
    command = [sys.executable, "-m", module, "--standalone", f"--nproc-per-node={workers}", *program]
    done = subprocess.run(
        command, env=_environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{module} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=500, help="steps that count in each run")
    parser.add_argument("--runs", type=int, default=5, help="of each peer")
    parser.add_argument("--workers", type=int, default=2, help="workers of the one node")
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
