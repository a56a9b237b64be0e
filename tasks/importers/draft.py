"""A job in the making: what is known of it so far, and what could not be kept."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic.alias_generators import to_camel

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document, Path

_SHOWN: Final = 60


class Foreign(BaseModel):
    """Part of a foreign format; a key that no field names is kept, so that it can be told."""

    model_config = ConfigDict(extra="allow", frozen=True)


class Camel(Foreign):
    """A part whose keys are written likeThis."""

    model_config = ConfigDict(alias_generator=to_camel)


Format = TypeVar("Format", bound=Foreign)


@dataclass(slots=True)
class Draft:
    """A job's keys and values, filled by one importer.

    Attributes:
        origin: What is translated, for messages: a file's name, or "the command line".
        job: The job as it will be written.
        warnings: One line for everything that was changed or dropped.
    """

    origin: str
    job: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    def say(self, place: str, text: str) -> None:
        """Add a warning; what is said twice is kept once."""
        line = f"{self.origin}: {place}: {text}"
        if line not in self.warnings:
            self.warnings.append(line)

    def drop(self, place: str, value: Any, why: str) -> None:
        """Say that a value is not in the job."""
        self.say(place, f"{shown(value)} is dropped: {why}")

    def set(self, path: str, value: Any) -> None:
        """Set a value of the job by its path, `nodes.min`."""
        *parents, last = path.split(".")
        section = self.job
        for key in parents:
            section = section.setdefault(key, {})
        section[last] = value

    def get(self, path: str, default: Any = None) -> Any:
        """Return a value of the job by its path."""
        section: Any = self.job
        for key in path.split("."):
            section = section.get(key) if isinstance(section, Mapping) else None
        return default if section is None else section

    def name(self, wanted: str, place: str) -> None:
        """Set the job's name, put into our alphabet."""
        name = re.sub(r"[^a-z0-9]+", "-", wanted.lower()).strip("-")[:63].rstrip("-")
        if not name or not name[0].isalpha():
            name = f"job-{name}"[:63].rstrip("-")
        if wanted and name != wanted:
            self.say(place, f"{shown(wanted)} becomes {name!r}: lower-case letters, digits and dashes")
        self.set("name", name)

    def nodes(self, *, least: int, most: int, target: int, place: str) -> None:
        """Set how many nodes train; a target outside the bounds is moved to the nearer one."""
        if least < 1:
            self.say(place, f"a minimum of {least} becomes 1: somebody must train")
            least = 1
        if most < least:
            raise RefusedInput([f"{self.origin}: {place}: the minimum is {least} and the maximum is {most}"])
        within = min(max(target, least), most)
        if within != target:
            self.say(place, f"{target} becomes {within}: the target lies between {least} and {most}")
        self.job["nodes"] = {"min": least, "target": within, "max": most}


def understand(model: type[Format], document: Document, path: Path = ()) -> Format:
    """Return a document, or the part of it at `path`, as one of a format's models.

    Raises:
        RefusedInput: Every value that the format does not allow, with its line.
    """
    data = document.data
    for part in path:
        data = data[part]
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise RefusedInput(
            [
                f"{document.source}: {document.at((*path, *problem['loc']))}: {_word(problem)}"
                for problem in error.errors()
            ]
        ) from error


def tell_unknown(draft: Draft, part: BaseModel, document: Document, path: Path = ()) -> None:
    """Say of every key that no field names that it is dropped."""
    for place, value in _extras(part, path):
        draft.drop(document.at(place), value, "there is nothing like it here")


def _extras(part: BaseModel, path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in (part.model_extra or {}).items():
        yield (*path, key), value
    for name, field_ in type(part).model_fields.items():
        yield from _within(getattr(part, name), (*path, field_.alias or name))


def _within(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if isinstance(value, BaseModel):
        yield from _extras(value, path)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from _within(entry, (*path, key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, entry in enumerate(value):
            yield from _within(entry, (*path, number))


def shown(value: Any) -> str:
    """Return a value as it is named in a message, cut where nobody would read on."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def _word(problem: Any) -> str:
    if problem["type"] == "missing":
        return "is required"
    message = problem["msg"].removeprefix("Value error, ")
    return f"{message[0].lower()}{message[1:]}, not {shown(problem['input'])}"
