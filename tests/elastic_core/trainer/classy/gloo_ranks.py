"""Ranks over real Gloo, forked of one warmed process: each trains the small config in both modes.

Arguments: number of ranks, port of rank 0, directory for their states.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from elastic_core.trainer.group import Group, Seat
from tests.elastic_core.trainer.classy.conftest import make_trainee

MODES = ("plain", "deterministic")


def train(rank: int, size: int, port: int, file: Path) -> None:
    trainees = {mode: make_trainee(deterministic=mode == "deterministic") for mode in MODES}
    group = Group(Seat(generation=1, rank=rank, world_size=size, host="127.0.0.1", port=port), timeout_s=60)
    group.form()
    for trainee in trainees.values():
        while trainee.step < trainee.total_steps:
            trainee.train_step(group)
        trainee.evaluate(group)
    torch.save({mode: trainee.state_dict() for mode, trainee in trainees.items()}, file)
    group.part()
    group.destroy()


def main() -> int:
    size, port, directory = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            try:
                train(rank, size, port, directory / f"{rank}.pt")
                os._exit(0)
            finally:
                os._exit(1)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


if __name__ == "__main__":
    sys.exit(main())
