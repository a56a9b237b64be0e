"""What a worker process is: its program, its arguments, its surroundings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Entrypoint:
    """The program that workers run.

    Attributes:
        kind: "script": a Python file, as `python target`; "module": as `python -m target`;
            "command": any program, executed without Python (nothing can be warmed for it).
        target: Path, module name or program.
    """

    kind: Literal["script", "module", "command"]
    target: str
