"""`--set nodes.target=3`: change single values of a job file on the command line."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from elastic_core.errors import RefusedInput


def apply_overrides(data: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """Return `data` with each `path.to.key=value` set; values are YAML.

    Raises:
        RefusedInput: An override has no `=`, or its value is not YAML. Unknown keys are left to the
            check of the job, which knows the near ones.
    """
    changed = copy.deepcopy(dict(data))
    problems = []
    for override in overrides:
        path, equals, text = override.partition("=")
        if not equals or not path:
            problems.append(f"--set {override!r}: write path.to.key=value, as in nodes.target=3")
            continue
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            problems.append(f"--set {override!r}: the value is not YAML: {' '.join(str(error).split())}")
            continue
        _set(changed, path.split("."), value)
    if problems:
        raise RefusedInput(problems)
    return changed


def _set(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    *parents, last = path
    for key in parents:
        if not isinstance(data.get(key), dict):
            data[key] = {}
        data = data[key]
    data[last] = value
