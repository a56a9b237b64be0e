"""Job files: read YAML, and word every mistake with its path, allowed values and nearest key."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError

from elastic_core.errors import RefusedInput
from elastic_core.model.job import JobSpec

MAX_BYTES = 1_000_000
"""A job file ends up in stores whose values are limited; nobody writes a larger one by hand."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a hint " (did you mean 'x'?)", or "" if nothing known is near."""
    found = difflib.get_close_matches(word, sorted(known), n=1, cutoff=0.6)
    return f" (did you mean {found[0]!r}?)" if found else ""


def parse_job(data: Mapping[str, Any], source: str) -> JobSpec:
    """Return the job that `data` describes.

    Args:
        data: The parsed file.
        source: Name of the file, for messages.

    Raises:
        RefusedInput: Every mistake, one line each.
    """
    try:
        return JobSpec.model_validate(data)
    except ValidationError as error:
        raise RefusedInput([f"{source}: {_word(problem)}" for problem in error.errors()]) from error


def load_job(path: Path) -> JobSpec:
    """Read a job file.

    Raises:
        RefusedInput: The file is missing, too large, not YAML, or holds mistakes.
    """
    return parse_job(read_mapping(path), str(path))


def read_mapping(path: Path) -> dict[str, Any]:
    """Read a job file without looking at its keys.

    Raises:
        RefusedInput: The file is missing, too large, or not a YAML mapping.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise RefusedInput(
            [f"job file {str(path)!r}: {error.strerror}; give the path of a YAML file"]
        ) from error
    if len(text) > MAX_BYTES:
        raise RefusedInput([f"job file {str(path)!r} has {len(text)} bytes; at most {MAX_BYTES} are read"])
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RefusedInput([f"job file {str(path)!r} is not YAML: {' '.join(str(error).split())}"]) from error
    if not isinstance(data, dict):
        raise RefusedInput([f"job file {str(path)!r} must be a mapping of keys, not {type(data).__name__}"])
    return data


def _word(problem: Any) -> str:
    location = [part for part in problem["loc"] if part not in ("classy", "script", "local", "docker", "aws")]
    path = ".".join(str(part) for part in location) or "job"
    value = problem["input"]
    if problem["type"] == "extra_forbidden":
        key = str(location[-1])
        model = _model_at(problem["loc"][:-1])
        known = list(model.model_fields) if model else []
        allowed = f"; allowed: {', '.join(known)}" if known else ""
        return f"{path}: unknown key {key!r}{nearest(key, known)}{allowed}"
    if problem["type"] == "missing":
        return f"{path}: is required"
    if problem["type"] in ("union_tag_not_found", "union_tag_invalid"):
        tag, allowed = problem["ctx"].get("tag"), ", ".join(_kinds_at(problem["loc"]))
        return f"{path}.kind: {f'unknown kind {tag!r}' if tag else 'is required'}; allowed: {allowed}"
    message = problem["msg"].removeprefix("Value error, ")
    shown = repr(value) if not isinstance(value, (dict, BaseModel)) else ""
    return f"{path}: {message}" + (f", not {shown}" if shown else "")


def _model_at(location: tuple[int | str, ...]) -> type[BaseModel] | None:
    """Follow a validation error's location through the models (union tags name a member)."""
    kind: Any = JobSpec
    for part in location:
        fields = getattr(kind, "model_fields", None)
        if fields is not None and part in fields:
            kind = fields[part].annotation
            continue
        members = [member for member in get_args(kind) if _tag(member) == part]
        if not members:
            return None
        kind = members[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _kinds_at(location: tuple[int | str, ...]) -> list[str]:
    """Return the kinds of which a key is one."""
    model = _model_at(location[:-1])
    members = get_args(model.model_fields[str(location[-1])].annotation) if model else ()
    return [tag for member in members if (tag := _tag(member))]


def _tag(member: Any) -> str | None:
    fields = getattr(member, "model_fields", {})
    return fields["kind"].default if "kind" in fields else None
