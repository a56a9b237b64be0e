"""Foreign files as plain data that knows on which line each entry stands."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import yaml

from elastic_core.errors import RefusedInput

Path = tuple[int | str, ...]
"""Where an entry is: keys and positions from the top."""

MAX_ENTRIES: Final = 20_000
"""Entries of a file, aliases written out: more is an attack or no job."""
MAX_DEPTH: Final = 60

_PLACEHOLDER: Final = re.compile(r"\{\{.*?\}\}|<your[^<>]*>|^<[a-z][a-z0-9_ #.-]*>$|PATH/TO\b", re.IGNORECASE)
_PLAIN: Final = frozenset(f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))


@dataclass(frozen=True, slots=True)
class Document:
    """One document of a file.

    Attributes:
        data: Plain values: mappings with text keys, lists, scalars.
        lines: Line of an entry, by its path.
    """

    source: str
    data: Any
    lines: Mapping[Path, int] = field(default_factory=dict)

    def at(self, path: Path) -> str:
        """Return the words for a place: `spec.minReplicas (line 7)`."""
        known = next(
            (self.lines[path[:end]] for end in range(len(path), -1, -1) if path[:end] in self.lines), 0
        )
        return f"{dotted(path)} (line {known})" if known else dotted(path)

    def unfilled(self) -> list[str]:
        """Return one line for each value that a template left to be filled in."""
        found = []
        for path, value in _values(self.data, ()):
            if isinstance(value, str) and (match := _PLACEHOLDER.search(value)):
                found.append(f"{self.source}: {self.at(path)}: is {value!r}: fill in {match.group()!r}")
        return found


def dotted(path: Path) -> str:
    """Return a path as people write it: `dataset.train.transforms[0]`."""
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".") or "the file"


def read_documents(text: str, source: str) -> list[Document]:
    """Return the documents of a YAML or JSON text; empty ones are left out.

    Raises:
        RefusedInput: It is neither, or it is too large or nested too deeply to be a job.
    """
    as_json = _json(text)
    try:
        documents = list(_documents(text, source))
    except RecursionError as error:
        raise RefusedInput([f"{source}: is nested too deeply for a job file"]) from error
    except RefusedInput as refusal:
        raise RefusedInput(list(_open_places(text, source)) or refusal.problems) from refusal
    except (yaml.YAMLError, ValueError) as error:
        if as_json is not None:
            return [Document(source, as_json)]
        told = " ".join(str(error).split())
        raise RefusedInput(
            [*_open_places(text, source), f"{source}: is neither YAML nor JSON: {told}"]
        ) from error
    if as_json is not None and documents:  # JSON's 1e-4 is a number, YAML's is a word
        return [Document(source, as_json, documents[0].lines)]
    return documents


def _documents(text: str, source: str) -> Iterator[Document]:
    loader = _Loader(text)
    while loader.check_node():
        lines: dict[Path, int] = {}
        data = _Converter(source, lines).convert(loader.get_node(), (), ())
        if data is not None:
            yield Document(source, data, lines)


def _json(text: str) -> Any:
    """Return a text's value if it is JSON, else None."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


class _Loader(yaml.SafeLoader):
    """Gives up early on what is nested too deeply: the library would take its time, and then break."""

    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Return the next node."""
        if self.depth > MAX_DEPTH:
            raise RecursionError
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


class _Converter:
    """Turns the nodes of one document into plain values."""

    def __init__(self, source: str, lines: dict[Path, int]) -> None:
        self._source = source
        self._lines = lines
        self._entries = 0

    def convert(self, node: yaml.Node | None, path: Path, above: tuple[int, ...]) -> Any:
        """Return the value of a node; `above` are the nodes that it lies in."""
        if node is None:
            return None
        self._entries += 1
        line = node.start_mark.line + 1
        if self._entries > MAX_ENTRIES or len(above) > MAX_DEPTH or id(node) in above:  # aliases nest, too
            raise RefusedInput([f"{self._source}: line {line}: has too many entries for a job file"])
        self._lines.setdefault(path, line)
        above = (*above, id(node))
        if isinstance(node, yaml.MappingNode):
            return dict(self._entry(key, value, path, above) for key, value in node.value)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(value, (*path, number), above) for number, value in enumerate(node.value)]
        return _scalar(node)

    def _entry(self, key: yaml.Node, value: yaml.Node, path: Path, above: tuple[int, ...]) -> tuple[str, Any]:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise RefusedInput(
                [f"{self._source}: line {line}: a key must be a word; fill in what a template left open"]
            )
        self._lines[(*path, key.value)] = line
        return key.value, self.convert(value, (*path, key.value), above)


def _scalar(node: Any) -> Any:
    """Return the value of a scalar; dates and what has a tag of its own stay text."""
    if node.tag not in _PLAIN:
        return node.value
    try:
        return yaml.SafeLoader("").construct_object(node)
    except (ValueError, yaml.YAMLError):
        return node.value


def _open_places(text: str, source: str) -> Iterator[str]:
    """Find the placeholders of a template that is not even YAML yet."""
    for number, line in enumerate(text.splitlines(), start=1):
        yield from (
            f"{source}: line {number}: fill in {found!r}" for found in re.findall(r"\{\{.*?\}\}", line)
        )


def _values(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _values(entry, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, entry in enumerate(value):
            yield from _values(entry, (*path, number))
    else:
        yield path, value
