"""A tiny training for tests of the elastic loop: two layers on generated points, in double precision."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.order import epoch_order, global_batch, shard, shards_of, steps_per_epoch
from elastic_core.trainer.trainee import Reducer, StepReport


@dataclass(frozen=True, slots=True, kw_only=True)
class ToyJob:
    """What is trained.

    Attributes:
        samples: Held-out ones are as many again.
        hidden: Width of the network, which decides how large the state is.
    """

    samples: int = 50
    batch_size: int = 8
    shards: int = 4
    epochs: int = 3
    hidden: int = 8
    seed: int = 0
    deterministic: bool = False

    def trainee(self, before_step: Callable[[int], None]) -> ToyTrainee:
        """Return the training."""
        return ToyTrainee(self, before_step=before_step)


class ToyTrainee:
    """A `Trainee` that calls back before it computes a step, so that a test can act in the middle of one."""

    def __init__(self, job: ToyJob, *, before_step: Callable[[int], None] = lambda _: None) -> None:
        self.job = job
        self.evaluated = -1
        self.figures: dict[str, float] = {}
        self._step = 0
        self._before_step = before_step
        generator = torch.Generator().manual_seed(job.seed)
        self._points = torch.randn(2 * job.samples, 4, generator=generator, dtype=torch.float64)
        self._labels = (self._points.sum(1) > 0).long()

    def set_up(self) -> None:
        """Build network and optimizer."""
        torch.manual_seed(self.job.seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, self.job.hidden), torch.nn.Tanh(), torch.nn.Linear(self.job.hidden, 2)
        ).double()
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)

    @property
    def step(self) -> int:
        """Finished steps."""
        return self._step

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.job.epochs * self._steps_per_epoch

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self._step // self._steps_per_epoch

    @property
    def _steps_per_epoch(self) -> int:
        return steps_per_epoch(self.job.samples, self.job.batch_size)

    def sample_ids(self, reducer: Reducer) -> Sequence[int]:
        """Return this rank's ids of the next step."""
        return [index for ids in self._shards(reducer).values() for index in ids]

    def _batch(self) -> Sequence[int]:
        order = epoch_order(self.job.samples, self.job.seed, self.epoch)
        return global_batch(order, self._step % self._steps_per_epoch, self.job.batch_size)

    def _shards(self, reducer: Reducer) -> dict[int, Sequence[int]]:
        batch, numbers = self._batch(), shards_of(reducer.rank, reducer.world_size, self.job.shards)
        return {number: shard(batch, number, self.job.shards) for number in numbers}

    def train_step(self, reducer: Reducer) -> StepReport:
        """Sum the gradients of all shards and update."""
        step, epoch, samples = self._step, self.epoch, len(self._batch())
        self._before_step(step)
        sums = {number: self._gradient(ids) for number, ids in self._shards(reducer).items()}
        if self.job.deterministic:
            total = reducer.reduce_shards(sums, self.job.shards)
        else:
            total = reducer.reduce(torch.stack(list(sums.values())).sum(0))
        parameters = list(self.model.parameters())
        parts = torch.split(total[:-1] / samples, [parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter).clone()
        self._optimizer.step()
        self._step += 1
        return StepReport(
            step=step, epoch=epoch, samples=samples, metrics={"loss": float(total[-1]) / samples}
        )

    def _gradient(self, ids: Sequence[int]) -> torch.Tensor:
        """Return the summed gradient of some samples, with their summed loss at its end."""
        self.model.zero_grad()
        chosen = list(ids)
        output = self.model(self._points[chosen])
        loss = torch.nn.functional.cross_entropy(output, self._labels[chosen], reduction="sum")
        torch.autograd.backward(loss)
        gradients = [
            parameter.grad.flatten() for parameter in self.model.parameters() if parameter.grad is not None
        ]
        return torch.cat([*gradients, loss.detach().view(1)])

    def evaluation_due(self) -> bool:
        """Return whether an epoch has just ended."""
        return self._step > 0 and self._step % self._steps_per_epoch == 0 and self.evaluated != self._step

    def evaluate(self, reducer: Reducer) -> Mapping[str, float]:
        """Return the accuracy on the held-out points."""
        held_out = torch.arange(self.job.samples + reducer.rank, 2 * self.job.samples, reducer.world_size)
        with torch.no_grad():
            right = (self.model(self._points[held_out]).argmax(1) == self._labels[held_out]).sum()
        total = reducer.reduce(torch.tensor([float(right), float(len(held_out))], dtype=torch.float64))
        self.figures = {"test_accuracy": float(total[0] / total[1]), "test_samples": float(total[1])}
        self.evaluated = self._step
        return self.figures

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state."""
        momenta = [self._optimizer.state[p].get("momentum_buffer") for p in self.model.parameters()]
        return {
            "step": self._step,
            "evaluated": self.evaluated,
            "figures": self.figures,
            "model": self.model.state_dict(),
            "momenta": momenta,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state.

        Raises:
            RefusedInput: It is of a network of another width.
        """
        for name, tensor in self.model.state_dict().items():
            if state["model"][name].shape != tensor.shape:
                raise RefusedInput(
                    [f"{name} has the shape {tuple(state['model'][name].shape)}, not {tuple(tensor.shape)}"]
                )
        self.model.load_state_dict(state["model"])
        for parameter, momentum in zip(self.model.parameters(), state["momenta"], strict=True):
            self._optimizer.state[parameter]["momentum_buffer"] = (
                None if momentum is None else momentum.clone()
            )
        self._step, self.evaluated = state["step"], state["evaluated"]
        self.figures = dict(state["figures"])

    def export(self, directory: Path) -> str:
        """Write the weights."""
        directory.mkdir(parents=True, exist_ok=True)
        torch.save(self.model.state_dict(), directory / "model.pt")
        (directory / "model.json").write_text(json.dumps({"hidden": self.job.hidden}))
        return str(directory)

    def results(self) -> Mapping[str, float]:
        """Return the figures of the last evaluation."""
        return self.figures
