"""Where other nodes reach this one: its address, its interface, and the port that it keeps free."""

from __future__ import annotations

import fcntl
import random
import socket
import struct
from typing import Final

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import Endpoint

PORTS: Final = range(20_000, 30_000)
"""Below the kernel's ephemeral range: no outgoing connection takes a reserved port between two uses."""

INTERFACE: Final = "GLOO_SOCKET_IFNAME"
"""Which interfaces gloo listens on; without it, the one that leads to the store."""

_SIOCGIFADDR: Final = 0x8915


def address_towards(*endpoints: Endpoint) -> str:
    """Return the address from which this machine reaches the first endpoint that it has a route to.

    Nothing is sent.

    Raises:
        RefusedInput: There is no route to any of them.
    """
    problems = []
    for endpoint in endpoints:
        try:
            return _source_towards(endpoint)
        except OSError as error:
            problem = f"the store's endpoint {endpoint}: no route to it ({error.strerror})"
            problems.append(f"{problem}: give this node's address by --advertise")
    raise RefusedInput(problems)


def _source_towards(endpoint: Endpoint) -> str:
    family, kind, protocol, _, target = socket.getaddrinfo(
        endpoint.host, endpoint.port, type=socket.SOCK_DGRAM
    )[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(target)
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str:
    """Return the network interface that has an IPv4 address, "" if none has."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""


def unknown_interfaces(names: str) -> list[str]:
    """Return which of these names, joined by commas, this machine has no interface of."""
    known = interfaces()
    return [name for name in names.split(",") if name not in known]


def interfaces() -> list[str]:
    """Return the names of this machine's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


class PortReservation:
    """A port that is bound, so that no one else takes it, until the node's own worker needs it."""

    def __init__(self) -> None:
        """Reserve a port at random.

        Raises:
            RefusedInput: No port of the range is free.
        """
        for port in random.sample(PORTS, len(PORTS)):
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._socket.bind(("", port))
            except OSError:
                self._socket.close()
                continue
            self.port = port
            return
        raise RefusedInput([f"no free TCP port in {PORTS.start}..{PORTS.stop - 1}: end what holds them"])

    def release(self) -> None:
        """Let the node's own worker have it."""
        self._socket.close()
