"""Values as JSON: one encoder and decoder for everything that crosses a process.

Encoded values carry no class name; a key or a message's `kind` tells what it
holds. Unknown fields are ignored, so that an older reader understands a newer
writer; missing ones take their defaults or are an error that names them.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import lru_cache
from typing import Any, TypeVar, cast

from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")


@lru_cache(maxsize=256)
def _adapter(kind: Hashable) -> TypeAdapter[Any]:
    return TypeAdapter(cast(Any, kind))


def encode(value: Any) -> bytes:
    """Return the JSON of a dataclass of `elastic_core.model`."""
    return _adapter(cast(Hashable, type(value))).dump_json(value)


def decode(kind: type[T], data: bytes | str) -> T:
    """Return the value of type `kind` that `data` holds.

    Raises:
        ValueError: The data is not a valid `kind`; the message names the fields.
    """
    try:
        value: T = _adapter(cast(Hashable, kind)).validate_json(data)
    except ValidationError as error:
        raise ValueError(f"not a valid {kind.__name__}: {error}") from error
    return value
