"""Dicts that remember which keys were asked for: what nobody asks for is a typing error.

So a config of a user's own component is checked without a schema of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elastic_core.trainer.classy.problems import at, unknown_key


class RecordingDict(dict[str, Any]):
    """A dict, and dicts within it, whose copies share one record of the keys that were asked for.

    Reading all of it (iterating, `**`) counts as asking for every key: whoever does so passes
    them on to something that refuses unknown ones.
    """

    def __init__(self, data: dict[str, Any], asked: set[str] | None = None) -> None:
        super().__init__({key: _wrap(value) for key, value in data.items()})
        self.asked: set[str] = set() if asked is None else asked

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a value and note the key."""
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def pop(self, key: str, *default: Any) -> Any:
        """Remove a value and note the key."""
        self.asked.add(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return a value, setting it if absent, and note the key."""
        self.asked.add(key)
        return super().setdefault(key, default)

    def __iter__(self) -> Iterator[str]:
        self.asked.update(super().keys())
        return super().__iter__()

    def keys(self) -> Any:
        """Return all keys, and note them."""
        self.asked.update(super().keys())
        return super().keys()

    def items(self) -> Any:
        """Return all items, and note the keys."""
        self.asked.update(super().keys())
        return super().items()

    def __copy__(self) -> RecordingDict:
        copied = RecordingDict({}, self.asked)
        dict.update(copied, zip(dict.keys(self), dict.values(self), strict=True))
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> RecordingDict:
        copied = RecordingDict({}, self.asked)
        for key, value in dict.items(self):
            dict.__setitem__(copied, key, _copy(value, memo))
        return copied

    def ignored(self, path: str, tolerated: frozenset[str] = frozenset()) -> list[str]:
        """Return a problem for every key that nobody asked for, here and within.

        Those in `tolerated` are none here.
        """
        found = [
            unknown_key(path, key, self.asked | {"name"})
            for key in dict.keys(self)
            if key not in self.asked and key != "name" and key not in tolerated
        ]
        for key, value in dict.items(self):
            found += _ignored_within(value, at(path, key)) if key in self.asked else []
        return found


def _wrap(value: Any) -> Any:
    if isinstance(value, dict):
        return RecordingDict(value)
    return [_wrap(entry) for entry in value] if isinstance(value, list) else value


def _copy(value: Any, memo: dict[int, Any]) -> Any:
    if isinstance(value, RecordingDict):
        return value.__deepcopy__(memo)
    return [_copy(entry, memo) for entry in value] if isinstance(value, list) else value


def _ignored_within(value: Any, path: str) -> list[str]:
    if isinstance(value, RecordingDict):
        return value.ignored(path)
    if isinstance(value, list):
        return [
            line for number, entry in enumerate(value) for line in _ignored_within(entry, at(path, number))
        ]
    return []
