"""How the members of a generation find each other: in a store that only this generation uses.

Rank 0 listens at the generation's own port. Waiting is done in short slices, so that
a meeting to which somebody will never come is left at once when a newer generation is known.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

_SLICE_S: Final = 0.05
_BIND_S: Final = 3.0
"""The agent releases the port just before; somebody else's use of it ends soon or never."""

_CONNECT_S: Final = 1.0
_STORE_S: Final = 30.0


class MeetingFailed(Exception):
    """The members did not come together; the group is not formed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where and as whom to meet.

    Attributes:
        port: Rank 0 listens there, at `host`.
        left: Set by another thread when waiting has no more sense.
    """

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
            store, address = self._host(), self.host
        else:
            store, address = self._visit(deadline)
        try:
            self._gather(store, deadline)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise MeetingFailed(f"the store of rank 0 at {self.host}:{self.port} is gone") from error
        return store, address

    def _host(self) -> Store:
        listener = self._listen()
        with _as_failure():
            return TCPStore(
                self.host,
                self.port,
                world_size=self.world_size,
                is_master=True,
                timeout=timedelta(seconds=_STORE_S),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )

    def _listen(self) -> socket.socket:
        """Listen at the own address only, or at all if the host's name is not an address of this machine."""
        deadline = time.monotonic() + _BIND_S
        host = self.host
        while True:
            try:
                return socket.create_server((host, self.port), family=_family(host), backlog=2048)
            except OSError as error:
                if error.errno == errno.EADDRNOTAVAIL and host:
                    host = ""
                elif error.errno != errno.EADDRINUSE or time.monotonic() > deadline:
                    raise MeetingFailed(
                        f"cannot listen at {self.host}:{self.port}: {error.strerror}"
                    ) from error
                else:
                    self._pause()

    def _visit(self, deadline: float) -> tuple[Store, str]:
        """Connect when rank 0 listens: torch's own waiting would sleep for a second between tries."""
        while True:
            try:
                with socket.create_connection((self.host, self.port), timeout=_CONNECT_S) as probe:
                    address = probe.getsockname()[0]
                break
            except OSError as error:
                if time.monotonic() > deadline:
                    raise MeetingFailed(
                        f"rank 0 does not answer at {self.host}:{self.port}: {error}"
                    ) from error
                self._pause()
        with _as_failure():
            store = TCPStore(self.host, self.port, is_master=False, timeout=timedelta(seconds=_STORE_S))
        return store, address

    def _gather(self, store: Store, deadline: float) -> None:
        """Say that this member is here and wait for the last one."""
        store.set(f"member/{self.rank}", "")
        if store.add("members", 1) == self.world_size:
            store.set("complete", "")
        while True:
            try:
                store.wait(["complete"], timedelta(seconds=_SLICE_S))
                return
            except dist.DistStoreError:
                self._check_left()
                if time.monotonic() > deadline:
                    raise MeetingFailed(self._missing(store)) from None

    def _missing(self, store: Store) -> str:
        missing = [rank for rank in range(self.world_size) if not store.check([f"member/{rank}"])]
        return f"ranks {missing} did not come within {self.timeout_s:.0f} s"

    def _pause(self) -> None:
        self.left.wait(_SLICE_S / 5)
        self._check_left()

    def _check_left(self) -> None:
        if self.left.is_set():
            raise MeetingFailed("it was left for a newer generation")


@contextlib.contextmanager
def _as_failure() -> Iterator[None]:
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise MeetingFailed(f"the store does not answer: {error}") from error


def _family(host: str) -> socket.AddressFamily:
    if not host:
        return socket.AF_INET
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
