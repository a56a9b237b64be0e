"""The plain script with three lines more: no step is lost, each sample is used once an epoch.

    elastic-train train examples/elastic_script.yaml
    torchrun --nproc-per-node=2 examples/elastic_script.py
    python examples/elastic_script.py

Beside `plain_script.py` it has lost its checkpoints, its own order of samples and its own counting.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

from elastic_core.trainer import elastic

SAMPLES, FEATURES, CLASSES = 4096, 32, 4
HIDDEN, GLOBAL_BATCH, EPOCHS = 1024, 64, 6


def make_data() -> TensorDataset:
    """Points around one centre a class: easy to learn, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(CLASSES, FEATURES, generator=generator)
    labels = torch.randint(CLASSES, (SAMPLES,), generator=generator)
    return TensorDataset(centres[labels] + 2.5 * torch.randn(SAMPLES, FEATURES, generator=generator), labels)


def main() -> None:
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, HIDDEN),
        torch.nn.ReLU(),
        torch.nn.Linear(HIDDEN, CLASSES),
    )
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    dataset = make_data()

    elastic.Snapshot(model=model, optimizer=optimizer, directory="elastic_script")  # 1: restores, too
    sampler = elastic.sampler(dataset, global_batch=GLOBAL_BATCH)  # 2
    for epoch in sampler.epochs(EPOCHS):
        for features, labels in DataLoader(dataset, batch_sampler=sampler):
            loss = torch.nn.functional.cross_entropy(model(features), labels) * elastic.weight()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            elastic.step(loss=loss.item())  # 3
        print(f"epoch {epoch} loss {loss.item():.4f}", flush=True)

    with torch.no_grad():
        features, labels = dataset.tensors
        accuracy = (model(features).argmax(1) == labels).float().mean().item()
    elastic.finish(train_accuracy=accuracy)
    print(f"accuracy {accuracy:.4f}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
