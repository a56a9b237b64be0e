"""A Classy Vision task as a `Trainee`: one step is the same step at every world size.

The global batch is cut into fixed virtual shards. Rank r of W computes the shards v with
v mod W = r, each as a micro-batch of its own; loss and gradients are weighted by samples, and
everything is summed in one reduction (`step`). BatchNorm sees one shard at a time, so its
statistics do not depend on the world size either.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy import hooks
from elastic_core.trainer.classy.average import WeightAverage
from elastic_core.trainer.classy.evaluation import Evaluation
from elastic_core.trainer.classy.export import export_model
from elastic_core.trainer.classy.finite import FiniteGuard
from elastic_core.trainer.classy.loader import Request, SampleLoader
from elastic_core.trainer.classy.mixing import mix
from elastic_core.trainer.classy.observers import Observer, build_observers
from elastic_core.trainer.classy.precise import PreciseStatistics
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.samples import count_correct, move
from elastic_core.trainer.classy.schedule import Schedule
from elastic_core.trainer.classy.seeds import derive, random_state_kept, seed_all
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.state import load_state, save_state
from elastic_core.trainer.classy.step import StepTensor
from elastic_core.trainer.classy.task import build_elastic_task
from elastic_core.trainer.classy.warm_start import begin_with
from elastic_core.trainer.order import epoch_order, global_batch, shard, shards_of
from elastic_core.trainer.trainee import Reducer, StepReport

_MOST_PROCESSES: Final = 4
"""Loader processes that are started without being asked for."""


class ClassyTrainee:
    """Model, data and optimizer of a Classy Vision config, ready for the elastic loop.

    Attributes:
        recipe: What is trained.
        schedule: Where steps are.
        evaluated: Finished steps at the last evaluation, -1 before the first.
        figures: What the last evaluation found.
    """

    def __init__(
        self, recipe: Recipe, *, cpus: int = 1, local_rank: int = 0, run_dir: Path | None = None
    ) -> None:
        self.recipe = recipe
        self._run_dir = run_dir
        self._observers: tuple[Observer, ...] = ()
        self.evaluated = -1
        self.figures: dict[str, float] = {}
        self._step = 0
        self._sample_shape: tuple[int, ...] = ()
        self._cpus = cpus
        with random_state_kept():
            seed_all(derive(recipe.seed, "model"))
            self.task = build_elastic_task(recipe.config, precision=recipe.precision)
        self.device = _device(local_rank) if self.task.use_gpu else torch.device("cpu")
        train, test = self.task.datasets["train"], self.task.datasets.get("test")
        self.schedule = Schedule(
            samples=len(train),
            global_batch=recipe.global_batch,
            epochs=recipe.config["num_epochs"],
            test_period=recipe.config.get("test_phase_period", 1) if test is not None else 0,
        )
        self._shuffles = bool(train.shuffle)
        self._order: tuple[int, Sequence[int]] = (-1, ())
        self._finite = FiniteGuard(recipe.non_finite)

    # ---- set-up --------------------------------------------------------------------------------

    def set_up(self) -> None:
        """Build what training needs and run one dry step; the state is as before it."""
        self.prepare()
        self.run_dry()
        self._observers = build_observers(self.recipe.config, self._run_dir)

    def prepare(self) -> None:
        """Build what training needs."""
        with random_state_kept():
            seed_all(derive(self.recipe.seed, "model"))  # fine-tuning initialises fresh heads here
            self.task.prepare()
        if not self.parameters():
            raise RefusedInput(
                ["model: nothing of it is trained: freeze_trunk wants heads, or a linear layer at the end"]
            )
        if self.recipe.warm_start:
            begin_with(self.task.base_model, Path(self.recipe.warm_start))
        self._loader = self._loader_of("train")
        test_loader = self._loader_of("test")
        self._evaluation = Evaluation(self.task, test_loader, self.recipe.config, self.device)
        self._step_tensor = StepTensor(list(self.parameters().values()), list(self.buffers().values()))
        self.average = self._average()

    def first_batch(self) -> Any:
        """Return the samples of the first shard, to be looked at."""
        assert self._loader is not None
        request = next(self._requests(0, SoloReducer()))
        return move(self._loader.fetch(request, lambda: [request]), self.device)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Return what is trained, by name; a loss may have parameters too."""
        named = dict(self.task.base_model.named_parameters())
        named |= {f"loss.{name}": parameter for name, parameter in self.task.base_loss.named_parameters()}
        return {name: parameter for name, parameter in named.items() if parameter.requires_grad}

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers of model and loss, by name."""
        named = dict(self.task.base_model.named_buffers())
        return named | {f"loss.{name}": buffer for name, buffer in self.task.base_loss.named_buffers()}

    def _loader_of(self, phase: str) -> SampleLoader | None:
        dataset = self.task.datasets.get(phase)
        if dataset is None:
            return None
        return SampleLoader(dataset, seed=self.recipe.seed, workers=self.loader_processes(phase))

    def loader_processes(self, phase: str) -> int:
        """Return how many processes fetch samples: none for data in memory, unless the config says."""
        section, dataset = self.recipe.config["dataset"][phase], self.task.datasets[phase]
        if section.get("num_workers") is not None:
            return int(section["num_workers"])
        in_memory = getattr(dataset, "in_memory", False) or section["name"].startswith("synthetic")
        return 0 if in_memory else max(1, min(_MOST_PROCESSES, self._cpus - 1))

    def _average(self) -> WeightAverage | None:
        hook = hooks.settings_of(self.recipe.config, hooks.EMA)
        if hook is None:
            return None
        with_statistics = hook.get("consider_bn_buffers", True)
        return WeightAverage(self.task.base_model, decay=hook["decay"], with_statistics=with_statistics)

    def run_dry(self) -> None:
        """Do a first step, which loads kernels and fills allocators, and take it back."""
        before = {
            name: tensor.detach().clone() for name, tensor in (self.parameters() | self.buffers()).items()
        }
        self.train_step(SoloReducer())
        with torch.no_grad():
            for name, tensor in (self.parameters() | self.buffers()).items():
                tensor.copy_(before[name])
        self._step = 0
        self.task.optimizer.optimizer.state.clear()
        if self.average is not None:
            self.average.reset()

    # ---- position ------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        """Finished optimizer steps, job-wide."""
        return self._step

    @property
    def total_steps(self) -> int:
        """Steps of the whole job."""
        return self.schedule.total_steps

    @property
    def epoch(self) -> int:
        """The epoch of the next step."""
        return self.schedule.epoch_of(self._step)

    def sample_ids(self, reducer: Reducer) -> Sequence[int]:
        """Return the ids that this rank trains in the next step, shard after shard."""
        shards = self._shards(self._step, reducer)
        return [index for ids in shards.values() for index in ids]

    def _batch(self, step: int) -> Sequence[int]:
        epoch = self.schedule.epoch_of(step)
        if self._order[0] != epoch:
            samples = self.schedule.samples
            shuffled = epoch_order(samples, self.recipe.seed, epoch) if self._shuffles else range(samples)
            self._order = (epoch, shuffled)
        return global_batch(self._order[1], self.schedule.batch_of(step), self.recipe.global_batch)

    def _shards(self, step: int, reducer: Reducer) -> dict[int, tuple[int, ...]]:
        """Return this rank's shards of a step with their ids; in a short last batch some are empty."""
        batch = self._batch(step)
        numbers = shards_of(reducer.rank, reducer.world_size, self.recipe.shards)
        return {number: tuple(shard(batch, number, self.recipe.shards)) for number in numbers}

    def _requests(self, step: int, reducer: Reducer) -> Iterator[Request]:
        """Yield what this rank will fetch from a step to the end of its epoch."""
        epoch = self.schedule.epoch_of(step)
        while step < self.total_steps and self.schedule.epoch_of(step) == epoch:
            for ids in self._shards(step, reducer).values():
                if ids:
                    yield Request("train", epoch, ids)
            step += 1

    # ---- training ------------------------------------------------------------------------------

    def train_step(self, reducer: Reducer) -> StepReport:
        """Do one optimizer step: compute this rank's shards, reduce once, update.

        Raises:
            FloatingPointError: The loss is no number any more; nothing was updated.
        """
        dealt = len(self._batch(self._step))
        observers = self._observers if reducer.rank == 0 else ()
        for observer in observers:
            observer.before_step(self._step)
        with random_state_kept():
            try:
                per_shard = self._compute(reducer, dealt)
            except BaseException:
                self._step_tensor.restore_buffers()
                raise
        if self.recipe.deterministic:
            total = reducer.reduce_shards(per_shard, self.recipe.shards)
        else:
            total = reducer.reduce(self._step_tensor.flat)
        report = self._update(total, dealt)
        for observer in observers:
            observer.after_step(report)
        return report

    def _compute(self, reducer: Reducer, dealt: int) -> dict[int, torch.Tensor]:
        """Run forward and backward over this rank's shards; return each apart in deterministic mode."""
        self.task.enter_training()
        self._step_tensor.start()
        self._finite.start()
        per_shard: dict[int, torch.Tensor] = {}
        requests = self._requests(self._step, reducer)
        for number, ids in self._shards(self._step, reducer).items():
            if ids:
                request = Request("train", self.epoch, ids)
                self._run_shard(number, request, dealt, requests)
            if self.recipe.deterministic:
                per_shard[number] = self._step_tensor.take()
        return per_shard

    def _run_shard(self, number: int, request: Request, dealt: int, upcoming: Iterator[Request]) -> None:
        assert self._loader is not None
        fetched = self._loader.fetch(request, lambda: _starting_with(request, upcoming))
        sample = move(fetched, self.device)
        if sample is None:
            return  # none of its images can be read
        self._sample_shape = tuple(sample["input"].shape[1:])
        seed_all(derive(self.recipe.seed, "shard", self.epoch, self._step, number))
        if self.task.mixup_transform is not None:
            sample = mix(self.task.mixup_transform, sample)
        output = self.task.compute_model(sample)
        loss, weight = self.task.compute_loss(output, sample), len(output) / dealt
        (loss * weight).backward()
        self._finite.note(loss.item(), request.ids)
        self._step_tensor.add_shard(
            weight=weight,
            loss=loss.item(),
            correct=count_correct(output, sample["target"]),
            samples=len(output),
        )

    def _update(self, total: torch.Tensor, dealt: int) -> StepReport:
        step, epoch = self._step, self.epoch
        if total[-1] == 0:
            raise ValueError(f"none of the {dealt} samples of step {step} (epoch {epoch}) can be read")
        if not self._finite.accepts(total, step=step, epoch=epoch):
            return self._pass_over(dealt)
        figures = self._step_tensor.apply(total, dealt=dealt)
        optimizer = self.task.optimizer
        if self.task.clip_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters().values(), self.task.clip_grad_norm)
        self.task.elastic_where = self.schedule.where(step)
        optimizer.on_epoch(where=self.schedule.where(epoch * self.schedule.steps_per_epoch))
        optimizer.step(where=self.task.elastic_where)
        if self.average is not None:
            self.average.update()
        self._step += 1
        metrics = {
            "loss": figures["loss"],
            "accuracy": figures["correct"] / figures["samples"],
            "lr": float(optimizer.optimizer.param_groups[0]["lr"]),
        }
        if figures["samples"] != dealt:
            metrics["samples_left_out"] = dealt - figures["samples"]
        return StepReport(step=step, epoch=epoch, samples=dealt, metrics=metrics)

    def _pass_over(self, dealt: int) -> StepReport:
        """Count a step whose gradients are no numbers, and change nothing else: every rank does the same."""
        self._step += 1
        metrics = {"steps_passed_over": float(self._finite.in_a_row)}
        return StepReport(
            step=self._step - 1, epoch=self.schedule.epoch_of(self._step - 1), samples=dealt, metrics=metrics
        )

    # ---- evaluation ----------------------------------------------------------------------------

    def evaluation_due(self) -> bool:
        """Return whether the finished step ends an epoch that is to be evaluated and has not been yet."""
        return self.schedule.evaluates_at(self._step) and self.evaluated != self._step

    def evaluate(self, reducer: Reducer) -> Mapping[str, float]:
        """Evaluate each held-out sample once over all ranks, with the averaged weights if there are any."""
        self._measure_statistics(reducer)
        with self.average.in_place() if self.average is not None else nullcontext():
            self.figures = self._evaluation.run(reducer)
        self.evaluated = self._step
        for observer in self._observers if reducer.rank == 0 else ():
            observer.after_evaluation(self._step, self.figures)
        return self.figures

    def _measure_statistics(self, reducer: Reducer) -> None:
        """Measure BatchNorm's statistics over samples of the finished epoch, if a hook asks for it."""
        hook = hooks.settings_of(self.recipe.config, hooks.PRECISE_BN)
        if hook is None:
            return
        epoch = max(self._step - 1, 0) // self.schedule.steps_per_epoch
        steps = min(-(-hook["num_samples"] // self.recipe.global_batch), self.schedule.steps_per_epoch)
        first = epoch * self.schedule.steps_per_epoch
        numbers = shards_of(reducer.rank, reducer.world_size, self.recipe.shards)
        self.task.enter_training()
        with random_state_kept():
            PreciseStatistics(self.task.base_model, self.task.compute_model).measure(
                self._fetched(range(first, first + steps), reducer), numbers, reducer, self.recipe.shards
            )

    def _fetched(self, steps: range, reducer: Reducer) -> Iterator[tuple[int, Any]]:
        """Yield this rank's shards of some steps of one epoch, with their samples."""
        assert self._loader is not None
        for step in steps:
            for number, ids in self._shards(step, reducer).items():
                if ids:
                    epoch = self.schedule.epoch_of(step)
                    request = Request("train", epoch, ids)
                    upcoming = partial(_starting_with, request, self._requests(step, reducer))
                    sample = self._loader.fetch(request, upcoming)
                    seed_all(derive(self.recipe.seed, "shard", epoch, step, number))
                    yield number, move(sample, self.device)

    def results(self) -> Mapping[str, float]:
        """Return the figures of the last evaluation, `test_accuracy` among them."""
        return dict(self.figures)

    # ---- state ---------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the whole state; its tensors are the live ones."""
        return save_state(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over a state, or refuse it and stay as before.

        Raises:
            RefusedInput: It belongs to another model, data set, optimizer or way of training.
        """
        self._step = load_state(self, state)

    def export(self, directory: Path) -> str:
        """Write the trained model with what is needed to rebuild it; return its directory."""
        with self.average.in_place() if self.average is not None else nullcontext():
            return export_model(
                directory,
                model=self.task.base_model,
                config=self.recipe.config,
                dataset=self.task.datasets["train"],
                metrics={**self.figures, "steps": self._step},
                sample_shape=self._sample_shape,
            )


def _device(local_rank: int) -> torch.device:
    """Return this worker's GPU and make it the current one."""
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _starting_with(request: Request, upcoming: Iterator[Request]) -> Iterator[Request]:
    """Skip what lies before a request."""
    for foreseen in upcoming:
        if foreseen == request:
            yield foreseen
            break
    yield from upcoming
