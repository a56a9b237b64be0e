"""A script that knows nothing of Elastic Train: it runs under torchrun, and goes on from its own checkpoints.

    torchrun --nproc-per-node=2 examples/plain_script.py --checkpoint /tmp/plain.pt

It counts samples, not steps, so that a restart at another world size goes on where it stopped.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

SAMPLES, FEATURES, CLASSES = 4096, 32, 4
HIDDEN, GLOBAL_BATCH, EPOCHS = 1024, 64, 6


def make_data() -> tuple[torch.Tensor, torch.Tensor]:
    """Points around one centre a class: easy to learn, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return centres[labels] + 2.5 * torch.randn(SAMPLES, FEATURES, generator=generator), labels


def save(path: Path, state: dict[str, object]) -> None:
    """Write beside the file and rename: whoever is killed meanwhile leaves the old one whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(f".{os.getpid()}")
    torch.save(state, new)
    new.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--checkpoint", type=Path, default=Path(os.environ.get("ELASTIC_RUN_DIR") or ".") / "plain.pt"
    )
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )
    model = DistributedDataParallel(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    step = 0
    if arguments.checkpoint.exists():
        state = torch.load(arguments.checkpoint, weights_only=True)
        layers.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
        if rank == 0:
            print(f"resumed at step {step} on {world} workers", flush=True)

    features, labels = make_data()
    steps_per_epoch = SAMPLES // GLOBAL_BATCH
    while step < EPOCHS * steps_per_epoch:
        epoch, number = divmod(step, steps_per_epoch)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch))
        batch = order[number * GLOBAL_BATCH : (number + 1) * GLOBAL_BATCH][rank::world]
        loss = torch.nn.functional.cross_entropy(model(features[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % arguments.every == 0:
            state = {"model": layers.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            save(arguments.checkpoint, state)
            print(f"step {step} loss {loss.item():.4f} workers {world}", flush=True)

    with torch.no_grad():
        accuracy = (layers(features).argmax(1) == labels).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
