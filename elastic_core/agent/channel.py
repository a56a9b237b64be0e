"""The agent's ends of its sockets: to the fork server, and to the workers that connect.

Nothing here blocks and nothing runs by itself: `worker_group` waits for the
descriptors and calls. A worker is known by the first line it sends, the number of
its launch; a line that is no message is dropped, and a worker that lets messages
pile up is cut off rather than waited for.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Final

from elastic_core.channel import MAX_LINE, LineBuffer, to_line
from elastic_core.model.messages import AgentMessage, WorkerAttached, WorkerMessage, decode_worker_message

MAX_PATH: Final = 107
"""Bytes of a unix socket's path."""

_MAX_OUTGOING: Final = 8 * MAX_LINE
_CHUNK: Final = 1 << 16
_CHUNKS: Final = 64
"""Read at most in one go: more than any socket buffers, so one read drains a dead worker's."""


class Peer:
    """One connected stream socket: whole lines in, whole lines out, never waiting.

    Attributes:
        closed: The other end is gone, or was cut off.
    """

    def __init__(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        self.closed = False
        self._connection = connection
        self._buffer = LineBuffer()
        self._outgoing = bytearray()

    def fileno(self) -> int:
        """Return the descriptor to wait for."""
        return self._connection.fileno()

    @property
    def has_outgoing(self) -> bool:
        """Whether `flush` has something to write once the socket takes it."""
        return bool(self._outgoing) and not self.closed

    def read(self) -> list[bytes]:
        """Return lines that have come; there may be more, for no peer may keep the others waiting."""
        lines: list[bytes] = []
        for _ in range(_CHUNKS):
            if self.closed:
                break
            try:
                data = self._connection.recv(_CHUNK)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            self.closed = not data
            lines += self._buffer.feed(data)
        return lines

    def write(self, line: bytes) -> None:
        """Send a line now, or keep what the socket does not take for `flush`."""
        if len(self._outgoing) + len(line) > _MAX_OUTGOING:
            self.closed = True
        if not self.closed:
            self._outgoing += line
            self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outgoing:
                del self._outgoing[: self._connection.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:
            self.closed = True

    def close(self) -> None:
        """End the connection."""
        self.closed = True
        self._connection.close()


class WorkerPeer(Peer):
    """A worker's connection.

    Attributes:
        launch: The launch that it said it is, None before it said so, -1 if it said nonsense.
        attached: It said `WorkerAttached`: it wants the agent's messages.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.launch: int | None = None
        self.attached = False

    def messages(self) -> list[WorkerMessage]:
        """Return the messages among the lines that have come."""
        found: list[WorkerMessage] = []
        for line in self.read():
            if self.launch is None:
                self.launch = int(line) if line.isdigit() and len(line) < 10 else -1
                continue
            with contextlib.suppress(ValueError):
                found.append(decode_worker_message(line))
        self.attached = self.attached or any(isinstance(message, WorkerAttached) for message in found)
        return found


class WorkerListener:
    """The socket that workers connect to, and their connections."""

    def __init__(self, path: Path) -> None:
        """Listen at `path`.

        Raises:
            ValueError: The path is too long for a unix socket.
        """
        if len(os.fsencode(path)) > MAX_PATH:
            raise ValueError(f"socket path {str(path)!r} is over {MAX_PATH} bytes: use a shorter directory")
        self.path = path
        self.peers: list[WorkerPeer] = []
        path.unlink(missing_ok=True)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen(128)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """Return the listening descriptor."""
        return self._socket.fileno()

    def accept(self) -> list[WorkerPeer]:
        """Return the connections that have come."""
        new: list[WorkerPeer] = []
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._socket.accept()
                new.append(WorkerPeer(connection))
        self.peers += new
        return new

    def send(self, message: AgentMessage, *, wanted: Callable[[int], bool]) -> None:
        """Send to all attached workers whose launch is `wanted`."""
        line = to_line(message)
        for peer in self.peers:
            if peer.attached and peer.launch is not None and wanted(peer.launch):
                peer.write(line)

    def drop(self, peer: WorkerPeer) -> None:
        """Close and forget one connection."""
        peer.close()
        self.peers.remove(peer)

    def close(self) -> None:
        """Close everything and remove the socket."""
        for peer in self.peers:
            peer.close()
        self.peers.clear()
        self._socket.close()
        self.path.unlink(missing_ok=True)
