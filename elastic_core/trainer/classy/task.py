"""Classy Vision's tasks made elastic: the same config, upgraded by itself.

A task keeps what is Classy Vision's: model, loss, data sets, meters, optimizer and its
schedules. What depends on the world (samplers, the distributed wrapper, `where`,
the loop) is taken out of it; `trainee` does that part.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from elastic_core.errors import RefusedInput
from elastic_core.model.job import Precision
from elastic_core.trainer.classy.compat import TASK_REGISTRY, ClassificationTask, FineTuningTask
from elastic_core.trainer.classy.weights import as_classy_state, read_weights

_OWN_LOOP: Final = (
    "train_step",
    "eval_step",
    "run_optimizer",
    "advance_phase",
    "on_phase_start",
    "on_phase_end",
)
"""Methods of the old loop: a task that overrides one of them would silently lose what it does there."""


class ElasticMixin:
    """What every elastic task has, over the Classy Vision task that it is mixed into."""

    base_model: Any
    base_loss: Any
    use_gpu: bool
    precision: Precision = "float32"
    elastic_where: float = 0.0
    """Set by the trainee before each step: a function of finished and total steps alone."""

    @property
    def where(self) -> float:
        """The part of training that is done, in [0, 1)."""
        return self.elastic_where

    @property
    def model(self) -> Any:
        """The model itself: gradients are summed by the trainee, not by a wrapper."""
        return self.base_model

    @property
    def loss(self) -> Any:
        """The loss itself, for the same reason."""
        return self.base_loss

    def compute_model(self, sample: Any) -> Any:
        """Run the model, in the job's precision; outputs are float32, as losses and meters want them."""
        if self.precision == "float32":
            return super().compute_model(sample)  # type: ignore[misc]  # from the Classy Vision task
        kind = "cuda" if self.use_gpu else "cpu"
        with torch.autocast(kind, dtype=torch.bfloat16):
            output = super().compute_model(sample)  # type: ignore[misc]
        return output.float() if isinstance(output, torch.Tensor) else output

    def init_distributed_data_parallel_model(self) -> None:
        """Wrap nothing."""

    def enter_training(self) -> None:
        """Put model and loss in training mode, as this kind of task wants it (fine-tuning freezes parts)."""
        self._set_mode(True)

    def enter_evaluation(self) -> None:
        """Put model and loss in evaluation mode."""
        self._set_mode(False)

    def _set_mode(self, training: bool) -> None:
        self.train = training
        self.phases = [{"train": training}]
        self.phase_idx = 0
        self._set_model_train_mode()  # type: ignore[attr-defined]  # from the Classy Vision task


class FineTuningMixin(ElasticMixin):
    """What an elastic fine-tuning has: any file of weights, and a trunk that may be another library's."""

    def prepare(self: Any) -> None:
        """Build what training needs, starting from the pretrained weights.

        Raises:
            RefusedInput: They cannot be read or do not fit; the first tensor that does not is named.
        """
        path = self.pretrained_checkpoint_path
        data = as_classy_state(
            self.base_model,
            read_weights(path, key="pretrained_checkpoint"),
            reset_heads=self.reset_heads,
            strict=self.pretrained_checkpoint_load_strict,
        )
        self._set_pretrained_checkpoint_dict(data)
        self.pretrained_checkpoint_path = None  # else it would be read again, and not by `weights`
        try:
            super().prepare()  # type: ignore[misc]  # from the Classy Vision task
        finally:
            self.pretrained_checkpoint_path = path
            self._set_pretrained_checkpoint_dict(None)
        if self.freeze_trunk:
            for parameter in self._classifier_parameters():
                parameter.requires_grad = True

    def _classifier_parameters(self: Any) -> Iterator[torch.nn.Parameter]:
        classifier = getattr(self.base_model, "classifier", "")
        if isinstance(classifier, str) and classifier:
            yield from self.base_model.get_submodule(classifier).parameters()


class ElasticClassificationTask(ElasticMixin, ClassificationTask):  # type: ignore[misc]  # no types there
    """`classification_task` on the elastic API."""


class ElasticFineTuningTask(FineTuningMixin, FineTuningTask):  # type: ignore[misc]  # no types there
    """`fine_tuning` on the elastic API."""


_ELASTIC: dict[type, type] = {
    ClassificationTask: ElasticClassificationTask,
    FineTuningTask: ElasticFineTuningTask,
}


def elastic_class(name: str) -> type:
    """Return the elastic form of a registered task.

    Raises:
        RefusedInput: The task is unknown, is no classification task, or brings a loop of its own.
    """
    if name not in TASK_REGISTRY:
        raise RefusedInput(
            [f"name: task {name!r} is not registered; known: {', '.join(sorted(TASK_REGISTRY))}"]
        )
    kind = TASK_REGISTRY[name]
    if kind in _ELASTIC:
        return _ELASTIC[kind]
    if not issubclass(kind, ClassificationTask):
        raise RefusedInput([f"name: task {name!r} is no ClassificationTask: run it as training.kind: script"])
    base = FineTuningTask if issubclass(kind, FineTuningTask) else ClassificationTask
    own = [method for method in _OWN_LOOP if getattr(kind, method) is not getattr(base, method)]
    if own:
        raise RefusedInput(
            [
                f"name: task {name!r} overrides {', '.join(own)}, which the elastic loop replaces: override "
                "compute_model or compute_loss instead, or run it as training.kind: script"
            ]
        )
    mixin = FineTuningMixin if base is FineTuningTask else ElasticMixin
    _ELASTIC[kind] = type(f"Elastic{kind.__name__}", (mixin, kind), {})
    return _ELASTIC[kind]


def build_elastic_task(config: Mapping[str, Any], *, precision: Precision = "float32") -> Any:
    """Build a task from a Classy Vision config, of a copy: Classy Vision writes into what it is given."""
    plain = copy.deepcopy(dict(config))
    data = plain["dataset"]
    plain["dataset"] = {phase: data[phase] for phase in data if data[phase] is not None}
    plain["hooks"] = []  # the trainee does what the supported ones do
    plain.pop("simulated_global_batchsize", None)  # it is the global batch, see `recipe`
    task = elastic_class(plain["name"]).from_config(plain)  # type: ignore[attr-defined]
    if plain.get("use_gpu") is None:
        task.set_use_gpu(torch.cuda.is_available())
    task.precision = precision
    return task
