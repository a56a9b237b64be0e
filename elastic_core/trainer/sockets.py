"""The connections of a process group, found by looking: torch keeps them to itself.

Gloo cannot be aborted: with a frozen peer its collectives wait for ever, whatever is
called. They return within milliseconds when their connections are shut down, so
that is how a group is ended. Listening sockets are left alone: Gloo answers
their end by ending the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from pathlib import Path

_SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


class Connections:
    """The internet connections that this process opened since this object was made."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: dict[int, int] | None = None

    def settle(self) -> None:
        """Take what is open now as the whole of it: later ones belong to others."""
        self._own = self._opened()

    def shut_down(self) -> None:
        """End the connections for both sides, whoever else holds their descriptors."""
        for descriptor, inode in (self._opened() if self._own is None else self._own).items():
            _shut_down(descriptor, inode)

    def _opened(self) -> dict[int, int]:
        return {
            descriptor: inode
            for descriptor, inode in _sockets().items()
            if self._before.get(descriptor) != inode
        }


def _sockets() -> dict[int, int]:
    """Return the inode of every socket of this process by descriptor."""
    found: dict[int, int] = {}
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, by another thread or by this listing
            kind, _, inode = str(entry.readlink()).partition(":")
            if kind == "socket":
                found[int(entry.name)] = int(inode.strip("[]"))
    return found


def _shut_down(descriptor: int, inode: int) -> None:
    """Shut a socket down if the descriptor still is that one, and a connection to somewhere."""
    with contextlib.suppress(OSError):
        copy = os.dup(descriptor)  # which nobody else can close and give to another socket meanwhile
        if os.fstat(copy).st_ino != inode:
            os.close(copy)
            return
        with socket.socket(fileno=copy) as connection:
            is_internet = connection.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                connection.shutdown(socket.SHUT_RDWR)


def interface_of(address: str) -> str:
    """Return the name of the interface that has an IPv4 address, or "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # an interface without an address
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
