"""What the nodes of a run said: the files in its directory, read to the end or followed."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastic_core.errors import RefusedInput
from elastic_core.model.job_file import nearest
from tasks.runs import RunDirectory

PERIOD_S: Final = 0.2
MAX_READ: Final = 1 << 20
MAX_LINE: Final = 64 << 10
"""A longer line is shown in pieces: a worker may print megabytes in one."""


@dataclass(slots=True)
class _File:
    """One log, read up to some place."""

    path: Path
    source: str
    at: int = 0
    rest: bytes = field(default=b"")

    def lines(self, *, last: bool = False) -> Iterator[str]:
        """Yield the whole lines that came since the last call; with `last`, an unfinished one too."""
        while chunk := self._read():
            *whole, self.rest = (self.rest + chunk).split(b"\n")
            if len(self.rest) > MAX_LINE:
                whole, self.rest = [*whole, self.rest], b""
            yield from (line.decode(errors="replace") for line in whole)
        if last and self.rest:
            yield self.rest.decode(errors="replace")
            self.rest = b""

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as stream:
                if self.path.stat().st_size < self.at:  # it was written anew
                    self.at = 0
                stream.seek(self.at)
                chunk = stream.read(MAX_READ)
        except FileNotFoundError:
            return b""
        self.at += len(chunk)
        return chunk


class RunLogs:
    """The logs of a run, of all of its nodes or of one."""

    def __init__(self, directory: RunDirectory, node: str = "") -> None:
        """Look for the logs.

        Raises:
            RefusedInput: There is no such node, or nothing was written here.
        """
        self._root = directory.path / "logs"
        self._node = node
        self._files: dict[Path, _File] = {}
        nodes = sorted(path.name for path in self._root.glob("*") if path.is_dir())
        if node and node not in nodes:
            known = ", ".join(nodes) or "none"
            raise RefusedInput([f"--node {node!r}: run {directory.run} has {known}{nearest(node, nodes)}"])
        if not nodes:
            where = directory.job().pool.kind
            elsewhere = "; nodes on AWS write to the log group of their cluster" if where == "aws" else ""
            raise RefusedInput([f"run {directory.run} has no logs in {self._root} (yet){elsewhere}"])

    def tail(self, lines: int) -> Iterator[str]:
        """Yield the last lines of each log, each with where it is from; later calls go on from there."""
        for file in self._look():
            newest = deque(file.lines(), maxlen=lines)
            yield from (f"{file.source} | {line}" for line in newest)

    def follow(self, is_over: Callable[[], bool]) -> Iterator[str]:
        """Yield what is written from now on, also by nodes that come later, until the run is over."""
        while True:
            over = is_over()  # asked first: what was written before is then read to the end
            for file in self._look():
                yield from (f"{file.source} | {line}" for line in file.lines(last=over))
            if over:
                return
            time.sleep(PERIOD_S)

    def _look(self) -> list[_File]:
        """Return all logs, agents' before workers'."""
        for path in sorted(self._root.glob(f"{self._node or '*'}/**/*.log")):
            if path not in self._files:
                self._files[path] = _File(path, " ".join(path.relative_to(self._root).with_suffix("").parts))
        return list(self._files.values())
