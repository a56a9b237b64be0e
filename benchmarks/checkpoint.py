"""What a checkpoint costs: how long training stands still, how long a save and a load take, beside peers.

    python -m benchmarks.checkpoint --mb 100 --json -

"stall" is the time for which the caller cannot train. Peers: plain `torch.save` into a temporary
file with fsync and rename, and `torch.distributed.checkpoint.async_save`. All write to one directory.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from elastic_core.clock import SystemClock
from elastic_core.trainer.checkpoint import CheckpointDirectory, Manifest, Token
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.script.memory import Mark, MemorySnapshots
from elastic_core.trainer.snapshot import HostBuffers, take_apart

GOAL_MS: Final = 20.0
_TENSORS: Final = 100
_SAVE_S: Final = 300.0

Measured = dict[str, list[float]]


def make_state(megabytes: float) -> dict[str, Any]:
    """Return weights and momenta of so many megabytes together, in a hundred tensors."""
    each = max(1, int(megabytes * 1e6 / 4 / _TENSORS))
    names = [f"layer{index}.weight" for index in range(_TENSORS // 2)]
    return {
        "model": {name: torch.randn(each) for name in names},
        "optimizer": {name: {"momentum_buffer": torch.randn(each)} for name in names},
        "step": 0,
    }


def measure_ours(state: dict[str, Any], directory: Path, runs: int) -> Measured:
    """Measure the checkpoint writer, and the parts of its stall."""
    found: Measured = {}
    checkpoints = CheckpointDirectory(directory, keep=1)
    writer = CheckpointWriter(checkpoints, clock=SystemClock())
    writer.claim(Token(1, 1), "benchmark")
    writer.reserve(state)
    buffers = HostBuffers()
    buffers.copy(state)
    memory = MemorySnapshots.new()
    for number in range(1, runs + 1):
        manifest = Manifest(step=number, attempt=1, generation=1)
        _time(found, "stall: take the state apart", lambda: take_apart(state))
        _time(found, "stall: copy it in memory", lambda: buffers.copy(state))
        start = time.perf_counter()
        writer.begin(state, manifest)
        found.setdefault("stall", []).append(time.perf_counter() - start)
        writer.wait(_SAVE_S)
        found.setdefault("save", []).append(time.perf_counter() - start)
        mark = Mark(step=number, attempt=1, generation=1, wall_time=0.0)
        _time(found, "snapshot that outlives the worker", lambda mark=mark: memory.keep(state, mark))
        _time(found, "load", checkpoints.newest)
    if writer.failures:
        raise SystemExit(f"the checkpoint was not written: {writer.last_error}")
    return found


def measure_torch(state: dict[str, Any], directory: Path, runs: int) -> Measured:
    """Measure `torch.save`, written as carefully; training stands still for all of it."""
    found: Measured = {}
    path, draft = directory / "state.pt", directory / "state.pt.draft"

    def save() -> None:
        with draft.open("wb") as stream:
            torch.save(state, stream)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)

    for _ in range(runs):
        _time(found, "save", save)
        _time(found, "load", lambda: torch.load(path, weights_only=True))
    found["stall"] = list(found["save"])
    return found


def measure_async(state: dict[str, Any], directory: Path, runs: int) -> Measured:
    """Measure torch's own asynchronous save, in a world of one."""
    found: Measured = {}
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for number in range(runs):
            target = str(directory / str(number))
            start = time.perf_counter()
            future: Any = dcp.async_save(state, checkpoint_id=target)
            found.setdefault("stall", []).append(time.perf_counter() - start)
            future.result()
            found.setdefault("save", []).append(time.perf_counter() - start)
            _time(found, "load", lambda target=target: dcp.load(state, checkpoint_id=target))
    finally:
        dist.destroy_process_group()
    return found


PEERS: Final[dict[str, Callable[[dict[str, Any], Path, int], Measured]]] = {
    "elastic-train": measure_ours,
    "torch.save": measure_torch,
    "torch async_save": measure_async,
}


def rows_of(peer: str, found: Measured, megabytes: float) -> Iterator[Row]:
    """Yield the rows of one peer, in milliseconds."""
    for case, seconds in sorted(found.items()):
        note = f"goal {GOAL_MS:g} ms for 100 MB" if (peer, case) == ("elastic-train", "stall") else ""
        values = [1000 * one for one in seconds]
        yield Row.of(values, peer=peer, case=f"{case}, {megabytes:g} MB", unit="ms", note=note)


def _time(found: Measured, case: str, work: Callable[[], Any]) -> None:
    start = time.perf_counter()
    work()
    found.setdefault(case, []).append(time.perf_counter() - start)


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--mb", type=float, default=100, help="megabytes of state (default 100)")
    parser.add_argument("--runs", type=int, default=5, help="measurements of each (default 5)")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), help="whom to measure")
    parser.add_argument("--directory", type=Path, help="where to write; default: a temporary directory")
    parser.add_argument("--json", default="", help='write JSON to a file, or to standard output with "-"')
    options = parser.parse_args()
    log_to_stderr()
    warnings.simplefilter("ignore")  # torch's, about its own parts
    torch.set_num_threads(1)  # as workers have it
    facts = machine_facts()
    state = make_state(options.mb)
    rows: list[Row] = []
    for peer in options.peers:
        with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=options.directory) as name:
            rows += rows_of(peer, PEERS[peer](state, Path(name), options.runs), options.mb)
    print_report(rows, options.json, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
