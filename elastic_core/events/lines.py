"""Lines of JSON that workers appended to files, read although some of them are torn.

A line is written in one call, but a full disk or a killed machine can cut one off,
and the next writer of the same file then goes on right behind it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


def parse_lines(text: Iterable[str]) -> Iterator[Mapping[str, Any]]:
    """Yield the objects that the lines hold; what is torn is left out."""
    for line in text:
        parsed = _parse(line)
        if parsed is not None:
            yield parsed


def _parse(line: str) -> Mapping[str, Any] | None:
    start = 0
    while start >= 0:  # behind a torn line there may be a whole one, without a line break between
        try:
            parsed = json.loads(line[start:])
        except ValueError:
            start = line.find("{", start + 1)
        else:
            return parsed if isinstance(parsed, dict) else None
    return None


def integer(line: Mapping[str, Any], key: str) -> int | None:
    """Return a field that must be a whole number, None if it is not."""
    value = line.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
