"""Mistakes of a config as lines of text: where, what, what is allowed, and what was probably meant."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from elastic_core.model.job_file import nearest

ROOT: Final = "training.config"
"""Where a Classy Vision config sits in a job: the start of every path."""

_MAX_LISTED: Final = 40


def at(path: str, *keys: object) -> str:
    """Return the path of an entry: `dataset.train`, `heads[0]`."""
    return path + "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys)


def unknown_key(path: str, key: str, allowed: Iterable[str]) -> str:
    """Return the problem of a key that means nothing."""
    known = sorted(allowed)
    return f"{at(path, key)}: unknown key {key!r}{nearest(key, known)}; allowed: {listed(known)}"


def missing_key(path: str, key: str, section: Mapping[str, Any], remedy: str = "") -> str:
    """Return the problem of a key that is required."""
    near = nearest(key, section)
    hint = near.replace("did you mean", "is that") if near else ""
    return f"{at(path, key)}: is required{hint}" + (f"; {remedy}" if remedy else "")


def wrong_value(path: str, value: Any, allowed: str) -> str:
    """Return the problem of a value that is not allowed."""
    return f"{path}: is {value!r}; it must be {allowed}"


def listed(words: Iterable[str]) -> str:
    """Return words separated by commas, cut where nobody would read on."""
    ordered = sorted(words)
    more = f" and {len(ordered) - _MAX_LISTED} more" if len(ordered) > _MAX_LISTED else ""
    return ", ".join(ordered[:_MAX_LISTED]) + more
