"""How the members of a generation find each other: at a port that only this generation uses.

Rank 0 listens; each member comes, says who it is and stays until rank 0 says that all are
here. Only then the port becomes torch's store. A store itself would not do: a member
that waits in it cannot be called away, and one that asks too early sleeps for a second.
"""

from __future__ import annotations

import contextlib
import errno
import selectors
import socket
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from elastic_core.channel import LineBuffer

_SLICE_S: Final = 0.02
"""After so long a wait looks whether it still has a sense."""

_BIND_S: Final = 3.0
"""The agent releases the port just before; somebody else's use of it ends soon or never."""

_CONNECT_S: Final = 1.0
_STORE_S: Final = 10.0
"""All members were alive a moment ago, so torch's store answers soon or its host has died."""

_ALL_HERE: Final = b"all here\n"
_MAX_HELLO: Final = 100


class MeetingFailed(Exception):
    """The members did not come together; the group is not formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as whom to meet.

    Attributes:
        generation: Members of another one are turned away.
        port: Rank 0 listens there, at `host`.
        left: Set by another thread when waiting has no more sense.
    """

    generation: int
    host: str
    port: int
    rank: int
    world_size: int
    left: threading.Event
    timeout_s: float

    def attend(self) -> tuple[Store, str]:
        """Wait until all members are here; return their store and the own address on the way to it.

        Raises:
            MeetingFailed: Somebody did not come, or `left` was set.
        """
        deadline = time.monotonic() + self.timeout_s
        if self.rank == 0:
            listener = self._listen()
            try:
                self._receive_members(listener, deadline)
            except BaseException:
                listener.close()
                raise
            return self._store(listener), self.host
        address = self._visit(deadline)
        return self._store(None), address

    def _store(self, listener: socket.socket | None) -> Store:
        try:
            return TCPStore(
                self.host,
                self.port,
                world_size=self.world_size,
                is_master=listener is not None,
                timeout=timedelta(seconds=_STORE_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach() if listener is not None else None,
            )
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise MeetingFailed(f"the store at {self.host}:{self.port} does not answer: {error}") from error

    # ---- rank 0 ------------------------------------------------------------------------------

    def _listen(self) -> socket.socket:
        """Listen at the own address only, or at every one if the host's name is none of this machine."""
        deadline, host = time.monotonic() + _BIND_S, self.host
        while True:
            try:
                listener = socket.create_server((host, self.port), family=_family(host), backlog=2048)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and host:
                    host = ""
                elif error.errno == errno.EADDRINUSE and time.monotonic() < deadline:
                    self._pause()
                else:
                    raise MeetingFailed(
                        f"cannot listen at {self.host}:{self.port}: {error.strerror}"
                    ) from error
            else:
                listener.setblocking(False)
                return listener

    def _receive_members(self, listener: socket.socket, deadline: float) -> None:
        """Wait for all other members, and tell them that they are here."""
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            reception = _Reception(self, selector)
            try:
                while len(reception.present) < self.world_size - 1:
                    for key, _ in selector.select(_SLICE_S):
                        if key.fileobj is listener:
                            reception.accept(listener)
                        else:
                            reception.hear(key.fileobj)  # type: ignore[arg-type]  # only sockets are in it
                    self._check_left()
                    if time.monotonic() > deadline:
                        missing = sorted(set(range(1, self.world_size)) - reception.present.keys())
                        raise MeetingFailed(f"ranks {missing} did not come within {self.timeout_s:.0f} s")
                reception.tell(_ALL_HERE)
            finally:
                reception.close()

    # ---- the others --------------------------------------------------------------------------

    def _visit(self, deadline: float) -> str:
        """Go to rank 0 until all are there; return the own address on that way."""
        trouble = "nobody listens there"
        while time.monotonic() < deadline:
            try:
                with socket.create_connection((self.host, self.port), timeout=_CONNECT_S) as connection:
                    connection.sendall(f"{self.generation} {self.rank}\n".encode())
                    connection.settimeout(_SLICE_S)
                    if self._stay(connection, deadline):
                        address: str = connection.getsockname()[0]
                        return address
                    trouble = "it sent this member away"
            except OSError as error:
                trouble = error.strerror or str(error)
            self._pause()
        raise MeetingFailed(f"rank 0 at {self.host}:{self.port} did not gather the members: {trouble}")

    def _stay(self, connection: socket.socket, deadline: float) -> bool:
        """Return True when all are here, False if rank 0 closed the connection or time is up."""
        heard = b""
        while time.monotonic() < deadline:
            self._check_left()
            with contextlib.suppress(TimeoutError):
                data = connection.recv(len(_ALL_HERE))
                heard += data
                if heard == _ALL_HERE or not data:
                    return heard == _ALL_HERE
        return False

    def _pause(self) -> None:
        self.left.wait(_SLICE_S / 2)
        self._check_left()

    def _check_left(self) -> None:
        if self.left.is_set():
            raise MeetingFailed("it was given up")


class _Reception:
    """Those who have come to rank 0.

    Attributes:
        present: The connection of each member that said who it is.
    """

    def __init__(self, meeting: Meeting, selector: selectors.BaseSelector) -> None:
        self.present: dict[int, socket.socket] = {}
        self._meeting = meeting
        self._selector = selector
        self._buffers: dict[socket.socket, LineBuffer] = {}

    def accept(self, listener: socket.socket) -> None:
        """Let somebody in."""
        with contextlib.suppress(OSError):  # gone already
            connection, _ = listener.accept()
            connection.setblocking(False)
            self._buffers[connection] = LineBuffer(_MAX_HELLO)
            self._selector.register(connection, selectors.EVENT_READ)

    def hear(self, connection: socket.socket) -> None:
        """Take in what somebody says: who it is, or that it has gone."""
        try:
            data = connection.recv(_MAX_HELLO)
        except OSError:
            data = b""
        if not data:
            self._forget(connection)
        for line in self._buffers[connection].feed(data) if data else ():
            rank = self._rank_in(line)
            if rank is None:
                self._forget(connection)
                return
            self.present[rank] = connection

    def tell(self, line: bytes) -> None:
        """Say something to all members; one that has gone will be missed soon enough."""
        for connection in self.present.values():
            with contextlib.suppress(OSError):
                connection.sendall(line)

    def close(self) -> None:
        """Let everybody go."""
        for connection in self._buffers:
            connection.close()

    def _rank_in(self, line: bytes) -> int | None:
        words = line.split()
        if len(words) != 2 or not all(word.isdigit() for word in words):
            return None
        generation, rank = map(int, words)
        is_member = generation == self._meeting.generation and 0 < rank < self._meeting.world_size
        return rank if is_member else None

    def _forget(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self.present = {rank: other for rank, other in self.present.items() if other is not connection}
        self._buffers.pop(connection)
        connection.close()


def _family(host: str) -> socket.AddressFamily:
    if not host:
        return socket.AF_INET
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
