"""The same training under torchft: each node is a replica group of one worker, quorums by its lighthouse."""

import os
import time
from datetime import timedelta
from typing import Any

import torch

from benchmarks.scripts.pace import Diary, pace


def main() -> None:
    """Train until killed."""
    from torchft import Manager, Optimizer, ProcessGroupGloo
    from torchft.ddp import PureDistributedDataParallel

    diary = Diary()
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    inner = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def take(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=30)),
        min_replica_size=2,
        load_state_dict=take,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        replica_id=f"{os.environ['BENCH_NODE']}_",
        timeout=timedelta(seconds=30),
    )
    # Its DDP with a communication hook asserts, and ends the survivor, when a peer dies (0.2.0, torch 2.14).
    parallel, optimizer = PureDistributedDataParallel(manager, model), Optimizer(manager, inner)
    diary.note("ready")
    generator = torch.Generator().manual_seed(os.getpid())
    group = None
    while True:
        began = time.monotonic()
        before = manager.current_step()
        inputs = torch.randn(32, 64, generator=generator)
        labels = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), labels).backward()
        optimizer.step()
        pace(began)
        rank, world = manager.participating_rank(), manager.num_participants()
        if rank is None or manager.current_step() == before:
            continue  # it heals, or the step was not committed
        if (rank, world, manager._quorum_id) != group:
            group = rank, world, manager._quorum_id
            diary.note("formed", rank=rank, world=world)
        diary.note("step", step=manager.current_step() - 1, rank=rank, world=world)


if __name__ == "__main__":
    main()
