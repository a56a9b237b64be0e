"""Tables of fields from JSON schemas: the job file's and the report's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

Schema = Mapping[str, Any]
_LIMITS: Final = {
    "minimum": "at least {}",
    "exclusiveMinimum": "more than {}",
    "maximum": "at most {}",
    "minItems": "at least {} of them",
    "maxLength": "at most {} characters",
    "pattern": "`{}`",
}
_WORDS: Final = {"integer": "whole number", "number": "number", "string": "text", "boolean": "true or false",
                 "object": "mapping", "null": "null"}  # fmt: skip


def sections(schema: Schema, *, limits: bool) -> Iterator[str]:
    """Yield a heading and a table for a schema and for each part of it, in the order of their use.

    Args:
        schema: Of a pydantic model.
        limits: Whether defaults and limits are columns: they are for what people write.
    """
    parts = schema.get("$defs", {})
    yield from _section(schema, parts, limits)
    for name in _order(schema, parts):
        if "properties" in parts[name]:
            yield from _section(parts[name], parts, limits)


def _section(schema: Schema, parts: Schema, limits: bool) -> Iterator[str]:
    yield f"## {schema['title']}\n\n{_first_paragraph(schema.get('description', ''))}\n\n"
    columns = ("key", "type", "default", "allowed", "meaning") if limits else ("field", "type", "meaning")
    rows = [columns, ("---",) * len(columns)]
    for key, field in schema["properties"].items():
        meaning = field.get("description", _meaning(field, parts))
        row = (f"`{key}`", _type(field, parts), _default(field), _allowed(field), meaning)
        rows.append(row if limits else (row[0], row[1], row[4]))
    yield "".join(f"| {' | '.join(_cell(cell) for cell in row)} |\n" for row in rows) + "\n"


def _order(schema: Schema, parts: Schema) -> list[str]:
    """Return the names of a schema's parts, depth first."""
    found: list[str] = []

    def visit(value: Any) -> None:
        if isinstance(value, Mapping):
            name = str(value.get("$ref", "")).rpartition("/")[2]
            if name and name not in found:
                found.append(name)
                visit(parts[name].get("properties", {}))
            for entry in value.values():
                visit(entry)
        elif isinstance(value, list):
            for entry in value:
                visit(entry)

    visit(schema["properties"])
    return found


def _type(field: Schema, parts: Schema) -> str:
    if "$ref" in field:
        part = parts[field["$ref"].rpartition("/")[2]]
        return f"[{part['title']}](#{slug(part['title'])})" if "properties" in part else _type(part, parts)
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    for key in ("oneOf", "anyOf"):
        if key in field:
            return " or ".join(_type(entry, parts) for entry in field[key])
    if field.get("type") == "array":
        return f"list of {_type(field.get('items', {}), parts)}"
    return _WORDS.get(field.get("type", ""), "any value")


def _default(field: Schema) -> str:
    if "default" not in field:
        return "required"
    value = field["default"]
    if isinstance(value, Mapping):
        return "" if "kind" not in value else f"kind `{value['kind']}`"
    return f"`{json.dumps(value)}`"


def _allowed(field: Schema) -> str:
    told = [text.format(field[key]) for key, text in _LIMITS.items() if key in field]
    if field.get("minLength") == 1:
        told.append("not empty")
    return ", ".join(told)


def _meaning(field: Schema, parts: Schema) -> str:
    name = str(field.get("$ref", "")).rpartition("/")[2]
    return _first_paragraph(parts[name].get("description", "")) if name else ""


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def slug(heading: str) -> str:
    """Return the anchor that a heading gets."""
    kept = "".join(character for character in heading.lower() if character.isalnum() or character in " -_")
    return kept.strip().replace(" ", "-")
