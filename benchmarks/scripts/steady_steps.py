"""A plain training at full speed: DDP on gloo; rank 0 writes down the milliseconds of each step."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

WARM_UP = 20


def main() -> None:
    """Train for as many steps as the second argument says; write to the file that the first names."""
    path, steps = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    parallel = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(256, 256), torch.randint(10, (256,))
    times = []
    for _ in range(WARM_UP + steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(parallel(inputs), labels).backward()
        optimizer.step()
        times.append((time.perf_counter() - began) * 1e3)
    if dist.get_rank() == 0:
        path.write_text(json.dumps(times[WARM_UP:]))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
