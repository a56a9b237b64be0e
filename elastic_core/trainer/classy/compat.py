"""Classy Vision 0.7.0 beside today's numpy and torch: the one module that imports it.

The library is no longer maintained. Its import warns three times over modules it
does not need, and four of its parts break; both are put right here, at their
source, so that nothing else has to know. Importing this module takes seconds of
processor time: the fork server does it once (`preload`), workers inherit it.
"""

from __future__ import annotations

import types
import warnings
from typing import Any, Final

import numpy as np
import torch

with warnings.catch_warnings():
    # torchvision's deprecated video helpers, torch.cuda.amp and pkg_resources users: not ours to mend
    warnings.simplefilter("ignore")
    import classy_vision.dataset.transforms.autoaugment as _autoaugment
    import classy_vision.generic.util as _generic
    from classy_vision.dataset import DATASET_REGISTRY, ClassyDataset, build_dataset, register_dataset
    from classy_vision.dataset.transforms import TRANSFORM_REGISTRY, build_transforms
    from classy_vision.dataset.transforms import util as transforms_util
    from classy_vision.dataset.transforms.mixup import MixupTransform, mixup_target
    from classy_vision.heads import HEAD_REGISTRY
    from classy_vision.hooks import HOOK_REGISTRY
    from classy_vision.losses import LOSS_REGISTRY, build_loss
    from classy_vision.meters import METER_REGISTRY, build_meter
    from classy_vision.models import MODEL_REGISTRY, ClassyModel, build_model, register_model
    from classy_vision.models.classy_model import _ClassyModelAdapter as ClassyModelAdapter
    from classy_vision.optim import OPTIMIZER_REGISTRY, ClassyOptimizer
    from classy_vision.optim.adamw import AdamW
    from classy_vision.optim.param_scheduler import PARAM_SCHEDULER_REGISTRY, build_param_scheduler
    from classy_vision.tasks import TASK_REGISTRY, ClassificationTask, FineTuningTask
    from classy_vision.trainer import ClassyTrainer

__all__ = [
    "DATASET_REGISTRY",
    "HEAD_REGISTRY",
    "HOOK_REGISTRY",
    "LOSS_REGISTRY",
    "METER_REGISTRY",
    "MODEL_REGISTRY",
    "OPTIMIZER_REGISTRY",
    "PARAM_SCHEDULER_REGISTRY",
    "TASK_REGISTRY",
    "TRANSFORM_REGISTRY",
    "ClassificationTask",
    "ClassyDataset",
    "ClassyModel",
    "ClassyModelAdapter",
    "ClassyOptimizer",
    "ClassyTrainer",
    "FineTuningTask",
    "MixupTransform",
    "build_dataset",
    "build_loss",
    "build_meter",
    "build_model",
    "build_param_scheduler",
    "build_transforms",
    "mixup_target",
    "register_dataset",
    "register_model",
    "transforms_util",
    "update_classy_model",
]

update_classy_model: Final = _generic.update_classy_model


class _NumpyWithInt(types.ModuleType):
    """numpy with the alias `int`, which it dropped in 1.24 and `imagenet_autoaugment` still uses."""

    int = int

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


class _ManyTensorAdamW(AdamW):  # type: ignore[misc]  # Classy Vision has no types
    """`adamw_mt` without `torch.optim._multi_tensor`, which is gone: the same update, in foreach form."""

    def prepare(self, param_groups: Any) -> None:
        """Build the optimizer for the given parameter groups."""
        self.optimizer = torch.optim.AdamW(
            param_groups,
            lr=self._lr,
            betas=self._betas,
            eps=self._eps,
            weight_decay=self._weight_decay,
            amsgrad=self._amsgrad,
            foreach=True,
        )


_autoaugment.np = _NumpyWithInt("numpy")
OPTIMIZER_REGISTRY["adamw_mt"] = _ManyTensorAdamW
