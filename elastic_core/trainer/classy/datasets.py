"""The data sets and models that come with the product, and the user's own: importing them registers them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy import array_sets, digits, image_folder, named_models, textures

BUILT_IN = (
    digits.DigitsDataset,
    textures.TexturesDataset,
    array_sets.MnistDataset,
    array_sets.FashionMnistDataset,
    array_sets.Cifar10Dataset,
    array_sets.Cifar100Dataset,
    image_folder.ImageFolderDataset,
    image_folder.ImagePathDataset,
    named_models.TorchvisionModel,
    named_models.TimmModel,
)


def register_user_package(names: str) -> None:
    """Import packages (separated by commas) and all their modules, so that what they register is known.

    Raises:
        RefusedInput: There is no such package, or a module of it raises.
    """
    for name in filter(None, (one.strip() for one in names.split(","))):
        _import_all(name)


def _import_all(name: str) -> None:
    try:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
            importlib.import_module(module.name)
    except Exception as error:  # the user's code may raise anything at import
        raise RefusedInput(
            [
                f"training.user_package: importing {name!r} failed: {type(error).__name__}: {error}; "
                "it must be importable from the working directory or installed"
            ]
        ) from error
