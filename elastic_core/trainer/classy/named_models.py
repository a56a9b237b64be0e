"""torchvision's and timm's models by name, for configs: `{"name": "torchvision", "model": "resnet18", …}`.

Keys: `model`, `num_classes`, `options` (further arguments of its constructor) and `weights` (a file
of starting values; a classifier of another size in it is left as it is).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torchvision

from elastic_core.errors import RefusedInput
from elastic_core.model.job_file import nearest
from elastic_core.trainer.classy.compat import ClassyModel, ClassyModelAdapter, register_model
from elastic_core.trainer.classy.weights import load_partly, read_weights


class NamedModel(ClassyModelAdapter):  # type: ignore[misc]  # Classy Vision has no types
    """A model of another library as a Classy Vision model without heads: its own last layer classifies."""

    wrapper_cls = None

    @property
    def classifier(self) -> str:
        """The name of its last linear layer."""
        linear = [name for name, module in self.named_modules() if isinstance(module, torch.nn.Linear)]
        return linear[-1] if linear else ""


def _build(kind: str, config: Mapping[str, Any], make: Callable[..., Any]) -> NamedModel:
    name, classes = config.get("model"), config.get("num_classes")
    if not isinstance(name, str):
        raise RefusedInput([f"{kind}: model is {name!r}: give the name of a model of {kind}"])
    if not isinstance(classes, int) or isinstance(classes, bool) or classes < 1:
        raise RefusedInput([f"{kind}: num_classes is {classes!r}: give the number of classes"])
    if config.get("heads"):
        raise RefusedInput([f"{kind}: heads: the model's own last layer classifies: remove them"])
    options = dict(config.get("options") or {})
    model = NamedModel(make(name, num_classes=classes, **options))
    weights = config.get("weights")
    if weights is not None:
        load_partly(model, read_weights(weights, key=f"{kind}: weights"), fresh=(model.classifier,))
    return model


@register_model("torchvision")
class TorchvisionModel(ClassyModel):  # type: ignore[misc]
    """A model of `torchvision.models`."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NamedModel:
        """Build the named model.

        Raises:
            RefusedInput: There is none of that name, or its weights do not fit.
        """

        def make(name: str, **options: Any) -> Any:
            known = torchvision.models.list_models(module=torchvision.models)
            if name not in known:
                raise RefusedInput([f"torchvision: there is no model {name!r}{nearest(name, known)}"])
            return torchvision.models.get_model(name, weights=None, **options)

        return _build("torchvision", config, make)


@register_model("timm")
class TimmModel(ClassyModel):  # type: ignore[misc]
    """A model of timm, which need not be installed."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> NamedModel:
        """Build the named model.

        Raises:
            RefusedInput: timm is not installed, has none of that name, or its weights do not fit.
        """

        def make(name: str, **options: Any) -> Any:
            try:
                import timm
            except ImportError:
                raise RefusedInput(["timm: is not installed where this runs: pip install timm"]) from None
            known = timm.list_models()
            if name not in known:
                raise RefusedInput([f"timm: there is no model {name!r}{nearest(name, known)}"])
            return timm.create_model(name, pretrained=False, **options)

        return _build("timm", config, make)
