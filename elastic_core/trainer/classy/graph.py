"""A trained model as one file that runs without its source: `torch.export`, or a TorchScript trace.

Both are checked before they are kept: the file is read again, and must name the same classes with the
same values as the model, for another number of samples than it was traced with.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal

import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.export import load_exported

Format = Literal["torch-export", "torchscript"]
FORMATS: Final[Mapping[Format, str]] = {"torch-export": "model.pt2", "torchscript": "model.torchscript.pt"}
"""Each format with the name of its file."""

TOLERANCE: Final = 1e-5
_TRACED, _CHECKED = 2, 3
"""Samples of the trace and of the check: not the same, so that neither is built into the graph."""


class _Classifier(torch.nn.Module):
    """A model with one named input: Classy Vision's own take any arguments, which a graph cannot."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the outputs for a batch of images."""
        outputs: torch.Tensor = self.model(images)
        return outputs


def write_graph(directory: Path, form: Format, file: Path | None = None) -> Path:
    """Write a trained model as one file, and return its path.

    Args:
        directory: Of an exported model.
        form: Which kind of file.
        file: Where; default: beside the weights.

    Raises:
        RefusedInput: There is no model, its inputs' shape is not known, or its code cannot be written so.
    """
    exported = load_exported(directory)
    if not exported.sample_shape:
        raise RefusedInput([f"{str(directory)!r} does not tell the shape of an input: train it again"])
    file = file or directory / FORMATS[form]
    example = torch.randn(_TRACED, *exported.sample_shape)
    new = file.with_name(f".{file.name}.new")
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a tracer: what it warns of is checked below
            model = _Classifier(exported.model)
            _write(model, form, example, new)
            difference = _difference(model, form, new, exported.sample_shape)
        if difference > TOLERANCE:
            raise ValueError(f"its values differ by {difference:g} from the model's")
    except Exception as error:  # a tracer raises whatever it met in a model's code
        new.unlink(missing_ok=True)
        told = (str(error).strip() or type(error).__name__).splitlines()[0]
        other = next(name for name in FORMATS if name != form)
        raise RefusedInput([f"--format {form}: not for this model ({told}); try {other}"]) from error
    new.replace(file)
    return file


def _write(model: Any, form: Format, example: torch.Tensor, file: Path) -> None:
    if form == "torchscript":
        torch.jit.trace(model, example).save(str(file))  # type: ignore[no-untyped-call]
        return
    batch = torch.export.Dim("batch", min=1)
    program = torch.export.export(model, (example,), dynamic_shapes=({0: batch},))
    with file.open("wb") as stream:
        torch.export.save(program, stream)


def _difference(model: Any, form: Format, file: Path, shape: tuple[int, ...]) -> float:
    with file.open("rb") as stream:
        read: Any = torch.jit.load(stream) if form == "torchscript" else torch.export.load(stream).module()  # type: ignore[no-untyped-call]
    images = torch.randn(_CHECKED, *shape)
    return float((read(images) - model(images)).abs().max())
