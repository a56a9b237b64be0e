"""Classy Vision configs, and jobs whose command named one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.legacy import Command
from elastic_core.trainer.classy.schema import find_problems, missing_paths
from tasks.importers.document import Document
from tasks.importers.draft import Draft

_DATA: Final = {"image_path": "image_folder", "image_folder": "root"}


def is_config(data: Any) -> bool:
    """Return whether data are a Classy Vision config, or were meant to be one."""
    if not isinstance(data, Mapping):
        return False
    return {"dataset", "model"} <= data.keys() or {"dataset", "optimizer"} <= data.keys()


def translate(document: Document, data_directory: str) -> Draft:
    """Return the job that trains a config.

    Raises:
        RefusedInput: The config has mistakes; all are named.
    """
    draft = Draft(document.source)
    stem = PurePosixPath(document.source).stem
    draft.name(stem.removesuffix("_config").removesuffix("_classy"), "its name")
    draft.set("training.kind", "classy")
    config = place_data(draft, document.data, data_directory)
    draft.set("training.config", config if config is not document.data else document.source)
    check_config(config, document.source, Path())
    return draft


def settle_config(draft: Draft, data_directory: str) -> None:
    """Put what a command line said of its config into the config, if that is here to be read.

    Raises:
        RefusedInput: It is here, and has mistakes.
    """
    training = draft.job["training"]
    workers = training.pop("num_workers", None)
    path = training["config"]
    try:
        config = json.loads(Path(path).read_text())
    except FileNotFoundError:
        _not_here(draft, path, workers)
        return
    except (OSError, ValueError) as error:
        raise RefusedInput(
            [f"training.config: {path!r} cannot be read: {error}; give a JSON config"]
        ) from error
    changed = Command("", workers, ()).apply(config) if workers is not None else config
    changed = place_data(draft, changed, data_directory)
    check_config(changed, path, Path())
    if changed != config:
        training["config"] = changed


def place_data(draft: Draft, config: Any, directory: str) -> Any:
    """Return a config whose images lie under `directory`, by the last names of their old paths."""
    if not directory or not isinstance(config, Mapping):
        return config
    changed = json.loads(json.dumps(config))
    for phase, section in changed.get("dataset", {}).items():
        key = _DATA.get(section.get("name", "")) if isinstance(section, dict) else None
        if key is None or not isinstance(section.get(key), str):
            continue
        old = section[key]
        section[key] = str(PurePosixPath(directory) / PurePosixPath(old).name)
        draft.say(f"dataset.{phase}.{key}", f"{old!r} becomes {section[key]!r}, as --data says")
    return changed


def check_config(config: Any, source: str, base: Path) -> None:
    """Refuse a config that cannot train, as far as reading it shows.

    Raises:
        RefusedInput: All mistakes.
    """
    if not isinstance(config, Mapping):
        raise RefusedInput([f"{source}: a config must be an object, not {type(config).__name__}"])
    problems = [*find_problems(config, base), *missing_paths(config, base), *_empty(config)]
    if problems:
        told = [problem.removeprefix("training.config.") for problem in dict.fromkeys(problems)]
        hint = (
            "; --data DIRECTORY names another place" if any("does not exist" in line for line in told) else ""
        )
        raise RefusedInput([f"{source}: {line}{hint if 'does not exist' in line else ''}" for line in told])


def _empty(config: Mapping[str, Any]) -> list[str]:
    """Return a problem for each value of the data that was left empty."""
    data = config.get("dataset")
    sections = data.items() if isinstance(data, Mapping) else ()
    return [
        f"dataset.{phase}.{key}: is empty; give its path"
        for phase, section in sections
        if isinstance(section, Mapping)
        for key, value in section.items()
        if value == "" and key not in ("root", "image_folder", "folder", "dataset_path")
    ]


def _not_here(draft: Draft, path: str, workers: int | None) -> None:
    draft.say("training.config", f"{path!r} is not here: put it here, or change its path in the job")
    if workers is not None:
        draft.say("training.config", f"set num_workers of dataset.train and dataset.test to {workers} there")
