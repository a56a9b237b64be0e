"""The line between an agent and its workers: JSON objects, one a line, over a unix stream socket.

Both ends are in here, free of torch: `AgentLink` is the worker's end, `LineBuffer`
cuts what either end receives. A line is bounded: a sender is refused a longer
one, a receiver drops it and counts it, so that no peer can fill the other's memory.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Final, Self

from elastic_core.errors import ElasticError
from elastic_core.model.codec import encode
from elastic_core.model.messages import AgentMessage, WorkerMessage, decode_agent_message

AGENT_SOCKET: Final = "ELASTIC_AGENT_SOCKET"
"""Environment variable: path of the agent's socket."""

WORKER_LAUNCH: Final = "ELASTIC_WORKER_LAUNCH"
"""Environment variable: what a worker says first, so that the agent knows which launch it is."""

SNAPSHOT_MEMORY: Final = "ELASTIC_SNAPSHOT_MEMORY"
"""Environment variable: two descriptors of memory that outlives a worker, with a comma between them."""

MAX_LINE: Final = 1 << 20
"""Bytes of a line, its end included. Failures are bounded to a few KiB; nothing comes near."""

_CHUNK: Final = 1 << 16


class LinkLost(ElasticError):
    """The other end of the line is gone, or does not read: this process should end or reconnect."""


class LineBuffer:
    """Cuts a stream of bytes into lines and drops those over the limit.

    Attributes:
        dropped: Lines dropped so far because they were longer than `limit`.
    """

    def __init__(self, limit: int = MAX_LINE) -> None:
        self.dropped = 0
        self._limit = limit
        self._partial = bytearray()
        self._skipping = False

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that `data` completes, without their ends."""
        *complete, rest = data.split(b"\n")
        lines = []
        for piece in complete:
            self._extend(piece)
            if self._skipping:
                self._skipping = False
            else:
                lines.append(bytes(self._partial))
            self._partial.clear()
        self._extend(rest)
        return lines

    def _extend(self, piece: bytes) -> None:
        if self._skipping:
            return
        if len(self._partial) + len(piece) >= self._limit:
            self.dropped += 1
            self._skipping = True
            self._partial.clear()
            return
        self._partial += piece


def to_line(value: object) -> bytes:
    """Return a message as one line.

    Raises:
        ValueError: The line is longer than `MAX_LINE`; bound the message's texts.
    """
    line = encode(value) + b"\n"
    if len(line) > MAX_LINE:
        raise ValueError(
            f"{type(value).__name__} of {len(line)} bytes is over the limit of {MAX_LINE}: bound its texts"
        )
    return line


class AgentLink:
    """A worker's connection to its agent.

    `send` may be called from any thread; `receive` from one thread at a time. Not to be
    used over a fork: a forked child must neither read nor write on it.
    """

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._buffer = LineBuffer()
        self._lines: deque[bytes] = deque()

    @classmethod
    def connect(cls, environment: Mapping[str, str] = os.environ, *, timeout_s: float = 5.0) -> Self:
        """Connect to the agent that the environment names and say which launch this is.

        Raises:
            LinkLost: No agent is named, or it does not answer.
        """
        path = environment.get(AGENT_SOCKET, "")
        if not path:
            raise LinkLost(f"{AGENT_SOCKET} is not set: this process was not started by an agent")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            connection.sendall(environment.get(WORKER_LAUNCH, "").encode() + b"\n")
        except OSError as error:
            connection.close()
            raise LinkLost(f"the agent's socket {path!r} does not answer: {error}") from error
        return cls(connection)

    def __enter__(self) -> Self:
        """Return the link; leaving closes it."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def fileno(self) -> int:
        """Return the socket's descriptor, to be waited on together with others.

        Before waiting on it, call `receive(0)` until it returns None: lines may be buffered.
        """
        return self._connection.fileno()

    def send(self, message: WorkerMessage) -> None:
        """Send a message whole.

        Raises:
            ValueError: The message is over `MAX_LINE`.
            LinkLost: The agent is gone or did not read for the connection's timeout.
        """
        line = to_line(message)
        with self._sending:
            try:
                self._connection.sendall(line)
            except OSError as error:
                raise LinkLost(f"the agent is gone: {error}") from error

    def receive(self, timeout_s: float | None = None) -> AgentMessage | None:
        """Return the agent's next message, or None if none came in time (None: wait for ever).

        A line that is no message is skipped: a newer agent may say what this worker does not know.

        Raises:
            LinkLost: The agent closed the connection or died.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            while self._lines:
                try:
                    return decode_agent_message(self._lines.popleft())
                except ValueError:
                    continue
            wait = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable(wait):
                return None
            self._lines.extend(self._buffer.feed(self._read()))

    def close(self) -> None:
        """End the connection; a `receive` that waits in another thread raises `LinkLost`."""
        with contextlib.suppress(OSError):  # the agent may have closed it first
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _readable(self, wait_s: float | None) -> bool:
        poll = select.poll()  # no select: descriptors over 1023 are common in training processes
        try:
            poll.register(self._connection, select.POLLIN)
        except ValueError as error:
            raise LinkLost("the connection was closed by this process") from error
        return bool(poll.poll(None if wait_s is None else wait_s * 1000))

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(_CHUNK)
        except OSError as error:
            raise LinkLost(f"the agent is gone: {error}") from error
        if not data:
            raise LinkLost("the agent closed the connection")
        return data
