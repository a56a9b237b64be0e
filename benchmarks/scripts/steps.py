"""A plain training script, as for torchrun: DDP on Gloo, and its own checkpoints."""

import os
import signal
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scripts.pace import EVERY_STEPS, Diary, pace


def main() -> None:
    """Train until killed."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    diary = Diary()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    diary.note("formed", rank=rank, world=world)
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = 0
    checkpoint = diary.directory / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    parallel = DistributedDataParallel(model)
    diary.note("ready", rank=rank, world=world)
    generator = torch.Generator().manual_seed(rank)
    while True:
        began = time.monotonic()
        inputs = torch.randn(32, 64, generator=generator)
        labels = inputs[:, :10].argmax(1)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), labels).backward()
        optimizer.step()
        pace(began)
        diary.note("step", step=step, rank=rank, world=world)
        step += 1
        if rank == 0 and step % EVERY_STEPS == 0:
            draft = checkpoint.with_suffix(".draft")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(state, draft)
            draft.replace(checkpoint)


if __name__ == "__main__":
    main()
