"""Three lines for a plain PyTorch loop, after which nothing is lost when machines come and go.

    from elastic_core.trainer import elastic

    snapshot = elastic.Snapshot(model=model, optimizer=optimizer)       # restores, too
    sampler = elastic.sampler(dataset, global_batch=64)                 # a batch sampler
    loader = DataLoader(dataset, batch_sampler=sampler)
    for epoch in sampler.epochs(10):
        for images, labels in loader:
            loss = criterion(model(images), labels)
            optimizer.zero_grad(); loss.backward(); optimizer.step()
            elastic.step(loss=loss.item())

The same script runs under this product's agents, under plain torchrun, and alone.
"""

from __future__ import annotations

from collections.abc import Sized

from elastic_core.trainer.script.sampler import ElasticSampler
from elastic_core.trainer.script.snapshot import Snapshot

__all__ = ["Snapshot", "finish", "sampler", "step", "weight"]


def sampler(dataset: Sized | int, *, global_batch: int, shuffle: bool = True) -> ElasticSampler:
    """Return the batch sampler of this training: each sample once an epoch, whatever the workers do.

    Args:
        dataset: The data set, or its number of samples.
        global_batch: Samples of one optimizer step over all workers, at any number of them.
        shuffle: Whether each epoch has an order of its own.

    Raises:
        RefusedInput: The restored state was trained with another order.
    """
    samples = dataset if isinstance(dataset, int) else len(dataset)
    return _current().order_samples(samples, global_batch=global_batch, shuffle=shuffle)


def step(**figures: float) -> None:
    """Say that an optimizer step is finished, with its figures (`loss=…`); call it once after each."""
    _current().finish_step(figures)


def weight() -> float:
    """Return by what to multiply a mean loss, so that uneven parts of a batch count by their samples."""
    return _current().weight()


def finish(*, model: str = "", **figures: float) -> None:
    """Say that the training is complete: final figures (`test_accuracy=…`), and where the model lies."""
    _current().finish(model=model, figures=figures)


def _current() -> Snapshot:
    if Snapshot.current is None:
        raise RuntimeError("there is no elastic.Snapshot() yet: make it first, from model and optimizer")
    return Snapshot.current
