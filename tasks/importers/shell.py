"""Shell texts in which a launcher is called: the call is found, the rest is told."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from elastic_core.errors import RefusedInput
from tasks.importers.launcher import is_launcher

_OPERATORS: Final = frozenset("();<>|&")
_BREAKS: Final = frozenset(("&&", ";", "\n"))


@dataclass(frozen=True, slots=True)
class Call:
    """A launcher's call in a shell text.

    Attributes:
        words: Its words, as the shell would split them.
        directory: Where the text went before, relative to where it began.
        skipped: The other statements; nobody runs them now.
    """

    words: tuple[str, ...]
    directory: str
    skipped: tuple[str, ...]


def find_call(text: str, place: str) -> Call:
    """Return the one call of a launcher in a shell text.

    Raises:
        RefusedInput: The text cannot be split, calls none or several, or pipes the call.
    """
    calls: list[tuple[str, ...]] = []
    directory, skipped = "", []
    for statement in _statements(text, place):
        if is_launcher(statement) and not (calls and statement[0].startswith("python")):
            calls.append(tuple(statement))
        elif statement[0] == "cd" and len(statement) == 2 and not calls:
            directory = posixpath.join(directory, statement[1])
        else:
            skipped.append(" ".join(statement))
    if len(calls) != 1:
        found = "calls no launcher" if not calls else f"calls a launcher {len(calls)} times"
        raise RefusedInput([f"{place}: {found}: one of torchrun, python -m torch.distributed.run is needed"])
    words = calls[0]
    if strange := [word for word in words if word and set(word) <= _OPERATORS]:
        raise RefusedInput(
            [f"{place}: {strange[0]!r} in the launcher's call: only a plain call is understood"]
        )
    return Call(words, directory, tuple(skipped))


def _statements(text: str, place: str) -> Iterator[list[str]]:
    """Yield the statements of a text, split into words."""
    joined = text.replace("\\\n", " ")
    statement: list[str] = []
    for line in joined.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
        lexer.whitespace_split = True
        try:
            words = list(lexer)
        except ValueError as error:
            raise RefusedInput([f"{place}: {line.strip()!r} is no shell command: {error}"]) from error
        for word in [*words, "\n"]:
            if word not in _BREAKS:
                statement.append(word)
            elif statement:
                yield statement
                statement = []
