"""What containers say, copied line by line into files that outlive them.

The engine's stream ends when its file is rotated, and the flow that reads it may
die. So the time of the last copied line is kept beside the copy: whoever goes on
asks for what came since, and copies nothing twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from docker.errors import DockerException, NotFound
from requests.exceptions import RequestException
from urllib3.exceptions import HTTPError

STAMP_LENGTH: Final = len("2026-01-31T12:00:00.000000000Z")
"""The engine writes times of lines in this one width, so that they compare as text."""

_RUNNING: Final = ("created", "running", "paused", "restarting")
_PAUSE_S: Final = 0.2


class LogFollowers:
    """Copies the logs of containers, one thread each, until they end."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}
        self._closing = threading.Event()

    def follow(self, container: Any, path: Path, stamp_file: Path) -> None:
        """Copy what a container says to the end of a file; done once for each container.

        Args:
            container: What speaks.
            path: Where its words go.
            stamp_file: Where it is kept up to which time they were copied.
        """
        if container.id in self._threads:
            return
        copy = LogCopy(container, path, stamp_file, self._closing)
        thread = threading.Thread(target=copy.run, name=f"log-{container.name}", daemon=True)
        self._threads[container.id] = thread
        thread.start()

    def finish(self, timeout_s: float) -> None:
        """Wait for the last lines of containers that have ended."""
        self._closing.set()
        for thread in self._threads.values():
            thread.join(timeout_s)


class LogCopy:
    """One container's log and its file."""

    def __init__(self, container: Any, path: Path, stamp_file: Path, closing: threading.Event) -> None:
        self._container = container
        self._path = path
        self._stamp_file = stamp_file
        self._closing = closing

    def run(self) -> None:
        """Copy until the container has ended and its last line is copied."""
        for file in (self._path, self._stamp_file):
            file.parent.mkdir(parents=True, exist_ok=True)
        while True:
            # Asked before the lines are read: what ended then has said all that it will.
            is_last = self._closing.is_set() or not self._runs()
            with suppress(DockerException, RequestException, HTTPError, OSError):  # it may come back
                self._copy()
            if is_last:
                return
            self._closing.wait(_PAUSE_S)

    def _runs(self) -> bool:
        try:
            self._container.reload()
        except NotFound:
            return False
        except (DockerException, RequestException):
            return True
        return self._container.status in _RUNNING

    def _copy(self) -> None:
        """Copy what came since the last copied line, until the stream ends."""
        last = self._last_stamp()
        with (
            self._path.open("ab", buffering=0) as log,
            self._stamp_file.open("r+b" if last else "wb", buffering=0) as stamp_file,
        ):
            for line in self._lines(last):
                stamp, text = line[:STAMP_LENGTH], line[STAMP_LENGTH + 1 :]
                if stamp <= last:  # also within a stream: the engine repeats lines around a rotation
                    continue
                last = stamp
                log.write(text)
                os.pwrite(stamp_file.fileno(), stamp, 0)

    def _lines(self, since: bytes) -> Iterator[bytes]:
        # The engine takes whole microseconds here; the lines of that one are compared by their stamps.
        start = {"since": datetime.fromisoformat(f"{since[:26].decode()}+00:00").timestamp()} if since else {}
        stream: Iterator[bytes] = self._container.logs(stream=True, follow=True, timestamps=True, **start)
        return stream

    def _last_stamp(self) -> bytes:
        try:
            return self._stamp_file.read_bytes()[:STAMP_LENGTH]
        except FileNotFoundError:
            return b""
