"""A file to which lines of JSON are appended, each in one write, so that a killed process tears none."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import structlog

log = structlog.get_logger(__name__)


class Journal:
    """Appends lines to a file. A line that cannot be written is counted and warned of once.

    Attributes:
        failures: Lines that were not written.
    """

    def __init__(self, path: Path | None) -> None:
        """Open the file for appending; without a path every line is dropped."""
        self.failures = 0
        self._path = path
        self._descriptor = -1
        self._is_torn = False

    def append(self, line: Mapping[str, Any]) -> None:
        """Append a line."""
        if self._path is None:
            return
        data = (b"\n" if self._is_torn else b"") + json.dumps(line, separators=(",", ":")).encode() + b"\n"
        try:
            written = os.write(self._open(self._path), data)
            self._is_torn = written < len(data)
            why = "the disk is full" if self._is_torn else ""
        except OSError as error:
            why = error.strerror or str(error)
        if why:
            self.failures += 1
            if self.failures == 1:
                log.warning("line not written, later ones are only counted", path=str(self._path), why=why)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _open(self, path: Path) -> int:
        if self._descriptor < 0:
            path.parent.mkdir(parents=True, exist_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o644)
        return self._descriptor
