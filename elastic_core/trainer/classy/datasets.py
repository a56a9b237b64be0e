"""The data sets that come with the product, and the user's own: importing them registers them."""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy import digits, image_folder

BUILT_IN = (digits.DigitsDataset, image_folder.ImageFolderDataset)


def register_user_package(name: str) -> None:
    """Import a package and all its modules, so that what they register is known.

    Raises:
        RefusedInput: There is no such package, or a module of it raises.
    """
    if not name:
        return
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
