"""A plain loop with the three lines, in double precision; it stands still where a test says so.

elastic_loop.py DIRECTORY [--epochs N]. A file `hold-STEP` in the directory keeps every worker in
front of that step until the file is gone; the weights of the end go to `final.pt`.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from elastic_core.trainer import elastic

SAMPLES, GLOBAL_BATCH = 50, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=8)
    parser.add_argument("--loaders", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    points = torch.randn(SAMPLES, 4, dtype=torch.float64)
    labels = (points.sum(1) > 0).long()
    torch.manual_seed(0)
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, options.hidden), torch.nn.Tanh(), torch.nn.Linear(options.hidden, 2)
    ).double()
    model = DistributedDataParallel(layers) if dist.is_initialized() else layers
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    snapshot = elastic.Snapshot(
        directory=options.directory / "alone", every=1, model=model, optimizer=optimizer
    )
    sampler = elastic.sampler(SAMPLES, global_batch=GLOBAL_BATCH)
    dataset = torch.utils.data.TensorDataset(points, labels)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=options.loaders)
    for _ in sampler.epochs(options.epochs):
        for batch, target in loader:
            while (options.directory / f"hold-{snapshot.step}").exists():
                time.sleep(0.005)
            loss = torch.nn.functional.cross_entropy(model(batch), target) * elastic.weight()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            elastic.step(loss=loss.item())
    if snapshot.rank == 0:
        torch.save(layers.state_dict(), options.directory / "final.pt")
    elastic.finish(test_accuracy=1.0)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
