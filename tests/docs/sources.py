"""What the source says of itself: docstrings of enums, of facts, of modules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Word:
    """A named thing and what the source says of it."""

    name: str
    value: object
    text: str


def module_docstring(path: str) -> str:
    """Return a module's docstring."""
    return ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""


def enum_words(path: str, name: str) -> Iterator[Word]:
    """Yield the members of an enum with the strings that stand below them."""
    body = _class(path, name).body
    for number, statement in enumerate(body):
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            below = body[number + 1] if number + 1 < len(body) else None
            text = ""
            if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
                text = " ".join(str(below.value.value).split())
            yield Word(statement.targets[0].id, ast.literal_eval(statement.value), text)


def facts(path: str, after: str, before: str) -> Iterator[Word]:
    """Yield the classes between two comments of a module, each with its first sentence."""
    text = (ROOT / path).read_text()
    first = text[: text.index(after)].count("\n") + 1
    last = text[: text.index(before)].count("\n") + 1 if before else text.count("\n") + 1
    for node in ast.parse(text).body:
        if isinstance(node, ast.ClassDef) and first < node.lineno < last:
            sentence = (ast.get_docstring(node) or "").split("\n\n")[0]
            yield Word(node.name, None, " ".join(sentence.split()))


def _class(path: str, name: str) -> ast.ClassDef:
    tree = ast.parse((ROOT / path).read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)
