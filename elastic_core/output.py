"""Output that may be lost, so that its writer never is: a log on a full disk must end no training."""

from __future__ import annotations

import contextlib
import io
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


class LossyOutput(io.RawIOBase):
    """An open file to write to; what the system refuses is dropped, and said to be written."""

    def __init__(self, descriptor: int, name: str) -> None:
        """Write to a descriptor that stays somebody else's: it is not closed with this object."""
        super().__init__()
        self.name = name
        self._descriptor = descriptor

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._descriptor

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        """Return True."""
        return True

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what can be written; there may be less of it, as with any file."""
        with contextlib.suppress(OSError):
            return os.write(self._descriptor, data)
        return memoryview(data).nbytes


def lossy(stream: TextIO) -> TextIO:
    """Return a stream to the same file, line by line, that never fails for the file's sake.

    Python flushes `sys.stdout` when it ends, and a flush that fails is exit code 120: so the stream
    is to be put in its place. One that is no real file is returned as it is.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    try:
        descriptor = stream.fileno()
    except io.UnsupportedOperation:
        return stream
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(LossyOutput(descriptor, str(stream.name))),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )
