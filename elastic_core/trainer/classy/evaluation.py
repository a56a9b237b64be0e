"""Evaluation: each held-out sample once over all ranks, counted exactly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from elastic_core.trainer.classy.loader import Request, SampleLoader
from elastic_core.trainer.classy.samples import count_correct, move
from elastic_core.trainer.classy.seeds import random_state_kept
from elastic_core.trainer.trainee import Reducer

_COUNTS: Final = "curr"
"""Classy Vision's meters keep what a rank has counted itself under keys that start so."""


class Evaluation:
    """The held-out samples in batches of the config's size, dealt to the ranks in turn.

    Batches are the same at every world size, so that outputs are too.
    """

    def __init__(
        self, task: Any, loader: SampleLoader | None, config: Mapping[str, Any], device: torch.device
    ) -> None:
        self._task = task
        self._device = device
        self._loader = loader
        self._samples = len(task.datasets["test"]) if loader is not None else 0
        self._batch = int(config["dataset"]["test"]["batchsize_per_replica"]) if loader is not None else 1

    def run(self, reducer: Reducer) -> dict[str, float]:
        """Return accuracy, loss and what the config's meters say.

        Raises:
            trainer.group.GroupBroken: A peer has gone; the evaluation may simply be run again.
        """
        for meter in self._task.meters:
            meter.reset()
        self._task.enter_evaluation()
        sums = torch.zeros(3, dtype=torch.float64)
        requests = list(self._requests(reducer))
        with torch.no_grad(), random_state_kept():
            for number, request in enumerate(requests):
                sums += self._evaluate(request, requests[number:])
        counts = [sums, *(self._counts_of(meter) for meter in self._task.meters)]
        totals = torch.split(
            reducer.reduce(torch.cat(counts).to(self._device)).cpu(), [len(count) for count in counts]
        )
        loss, correct, samples = totals[0].tolist()
        if samples == 0:
            raise ValueError("none of the held-out samples can be read")
        figures = {"test_accuracy": correct / samples, "test_loss": loss / samples}
        for meter, total in zip(self._task.meters, totals[1:], strict=True):
            self._set_counts(meter, total)
            figures |= _figures_of(meter)
        return figures

    def _requests(self, reducer: Reducer) -> Iterator[Request]:
        starts = range(0, self._samples, self._batch)
        for start in starts[reducer.rank :: reducer.world_size]:
            yield Request("test", 0, tuple(range(start, min(start + self._batch, self._samples))))

    def _evaluate(self, request: Request, upcoming: Sequence[Request]) -> torch.Tensor:
        assert self._loader is not None
        sample = move(self._loader.fetch(request, lambda: upcoming), self._device)
        if sample is None:
            return torch.zeros(3, dtype=torch.float64)
        output = self._task.compute_model(sample)
        count = len(output)
        loss = self._task.compute_loss(output, sample).item() * count
        for meter in self._task.meters:
            meter.update(output.cpu(), sample["target"].cpu(), is_train=False)
        return torch.tensor([loss, count_correct(output, sample["target"]), count], dtype=torch.float64)

    @staticmethod
    def _counts_of(meter: Any) -> torch.Tensor:
        state = meter.get_classy_state()
        counts = [state[key].flatten().double() for key in sorted(state) if key.startswith(_COUNTS)]
        return torch.cat(counts)

    @staticmethod
    def _set_counts(meter: Any, total: torch.Tensor) -> None:
        """Give a meter the sums over all ranks, as its own synchronisation would."""
        state = meter.get_classy_state()
        keys = [key for key in sorted(state) if key.startswith(_COUNTS)]
        parts = torch.split(total, [state[key].numel() for key in keys])
        for key, part in zip(keys, parts, strict=True):
            state[key] = part.view_as(state[key]).to(state[key].dtype)
        meter.set_classy_state(state)


def _figures_of(meter: Any) -> dict[str, float]:
    value = meter.value
    named = value if isinstance(value, dict) else {"": value}
    return {
        "_".join(["test", meter.name, *([str(key)] if key else [])]): float(figure)
        for key, figure in named.items()
    }


def is_summable(meter: Any) -> bool:
    """Return whether a meter's counts can be summed over ranks, as evaluation does."""
    try:
        state = meter.get_classy_state()
    except NotImplementedError:
        return False
    return any(key.startswith(_COUNTS) and isinstance(state[key], torch.Tensor) for key in state)
