"""A script under torchrun's contract: counted steps with an all-reduce each, resumed from its own file.

gloo_steps.py DIRECTORY --steps N. A file `fail-RANK` in the directory, which holds what to do
("kill", "raise", "exit"), makes that rank fail once; a file `enough` ends the training of all.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist


class Leave(Exception):
    pass


def leave(*_: object) -> None:
    raise Leave


def fail(directory: Path, rank: int) -> None:
    fault = directory / f"fail-{rank}"
    if not fault.exists():
        return
    how = fault.read_text()
    fault.unlink()
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    raise ValueError("bad label 7")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=100_000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    state = options.directory / "state"
    rank = int(os.environ["RANK"])
    step = 0
    try:
        dist.init_process_group("gloo")
        step = int(state.read_text() or "0") if state.exists() else 0
        note(options.directory, {"start": step, "world": dist.get_world_size(), "rank": rank})
        while step < options.steps:
            fail(options.directory, rank)
            is_enough = rank == 0 and (options.directory / "enough").exists()
            tensor = torch.tensor([1.0, float(is_enough)])
            dist.all_reduce(tensor)
            assert tensor[0].item() == dist.get_world_size()
            step += 1
            if rank == 0:
                draft = state.with_suffix(f".{os.getpid()}")
                draft.write_text(str(step))
                draft.replace(state)
            if tensor[1].item():
                break
            time.sleep(0.02)
    except Leave:
        note(options.directory, {"left": step, "rank": rank})
        os._exit(0)
    note(options.directory, {"done": step, "rank": rank})


def note(directory: Path, line: dict[str, object]) -> None:
    line["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (directory / "notes.jsonl").open("a") as log:
        log.write(json.dumps({"t": time.time(), **line}) + "\n")


if __name__ == "__main__":
    main()
