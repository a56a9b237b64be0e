"""The trained model as files: weights, and what is needed to build and use it again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

import elastic_core.trainer.classy.named_models  # noqa: F401  # an exported model may be one of them
from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import build_model, build_transforms

WEIGHTS: Final = "model.pt"
CONFIG: Final = "config.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedModel:
    """A trained model, ready to classify.

    Attributes:
        model: In evaluation mode.
        transform: What a sample goes through before the model, None if nothing.
        classes: Names of the outputs in their order.
        metrics: Final figures of the training.
        sample_shape: Of one input: (3, 224, 224). Empty where an older version wrote the model.
    """

    model: Any
    transform: Callable[[Any], Any] | None
    classes: tuple[str, ...]
    metrics: Mapping[str, float]
    sample_shape: tuple[int, ...] = ()


def export_model(
    directory: Path,
    *,
    model: Any,
    config: Mapping[str, Any],
    dataset: Any,
    metrics: Mapping[str, float],
    sample_shape: Sequence[int],
) -> str:
    """Write weights and description; a reader never sees half of either. Return the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    data = config["dataset"]
    described = {
        "model": {key: value for key, value in config["model"].items() if key != "weights"},
        "preprocessing": (data.get("test") or data["train"]).get("transforms"),
        "classes": list(getattr(dataset, "classes", ())),
        "metrics": dict(metrics),
        "sample_shape": list(sample_shape),
    }
    _replace(directory / WEIGHTS, lambda path: torch.save(model.state_dict(), path))
    _replace(directory / CONFIG, lambda path: path.write_text(json.dumps(described, indent=2) + "\n"))
    return str(directory)


def load_exported(directory: Path) -> ExportedModel:
    """Build an exported model again.

    Raises:
        RefusedInput: The directory holds no export, or its weights do not fit its config.
    """
    try:
        described = json.loads((directory / CONFIG).read_text())
        weights = torch.load(directory / WEIGHTS, weights_only=True, map_location="cpu")
        model = build_model(described["model"])
        model.load_state_dict(weights)
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise RefusedInput([f"{str(directory)!r} holds no exported model: {error}"]) from error
    preprocessing = described["preprocessing"]
    return ExportedModel(
        model=model.eval(),
        transform=build_transforms(preprocessing) if preprocessing else None,
        classes=tuple(described["classes"]),
        metrics=described["metrics"],
        sample_shape=tuple(described.get("sample_shape", ())),
    )


def preprocessing_of(directory: Path) -> Any:
    """Return the config of what a sample goes through before an exported model, None if nothing."""
    return json.loads((directory / CONFIG).read_text())["preprocessing"]


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    new = path.with_name(f".{path.name}.new")
    write(new)
    new.replace(path)
