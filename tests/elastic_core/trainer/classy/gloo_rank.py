"""One rank over real Gloo: trains the small config in both modes. Arguments: rank, size, port, file."""

from __future__ import annotations

import sys

import torch

from elastic_core.trainer.group import Group, Seat
from tests.elastic_core.trainer.classy.conftest import make_trainee

MODES = ("plain", "deterministic")


def main() -> None:
    rank, size, port = (int(argument) for argument in sys.argv[1:4])
    torch.set_num_threads(1)
    trainees = {mode: make_trainee(deterministic=mode == "deterministic") for mode in MODES}
    group = Group(Seat(generation=1, rank=rank, world_size=size, host="127.0.0.1", port=port), timeout_s=60)
    group.form()
    for trainee in trainees.values():
        while trainee.step < trainee.total_steps:
            trainee.train_step(group)
        trainee.evaluate(group)
    torch.save({mode: trainee.state_dict() for mode, trainee in trainees.items()}, sys.argv[4])
    group.part()
    group.destroy()


if __name__ == "__main__":
    main()
