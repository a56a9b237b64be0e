"""Where a store is and how to get in: addresses, TLS files, user and password."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from elastic_core.errors import RefusedInput

DEFAULT_PORT: Final = 2379
DEADLINE_S: Final = 2.0

USER_VARIABLE: Final = "ELASTIC_STORE_USER"
PASSWORD_VARIABLE: Final = "ELASTIC_STORE_PASSWORD"  # noqa: S105 - a name
"""A password is never an argument: other users of the machine could read it there."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address at which a member of the store answers.

    Attributes:
        host: Name or IP address; an IPv6 address is kept without brackets.
    """

    host: str
    port: int = DEFAULT_PORT

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether nothing that is sent there leaves the machine."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """PEM files of a TLS connection.

    Attributes:
        ca: Certificate authority that the other side's certificate must come from.
        cert: Own certificate, for a server that asks its clients for one; with `key` or not at all.
    """

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        problems = [
            f"TLS file {str(path)!r} cannot be read: check the path and its permissions"
            for path in (self.ca, self.cert, self.key)
            if path is not None and not path.is_file()
        ]
        if (self.cert is None) != (self.key is None):
            given = "certificate" if self.key is None else "key"
            problems.append(f"TLS: only the {given} is given; give certificate and key, or neither")
        if problems:
            raise RefusedInput(problems)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A user of the store; the password is never shown."""

    user: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class Access:
    """All that a client needs to get in.

    Attributes:
        timeout_s: Deadline of every call.
    """

    endpoints: tuple[Endpoint, ...]
    tls: TlsFiles | None = None
    credentials: Credentials | None = None
    timeout_s: float = DEADLINE_S

    def __post_init__(self) -> None:
        exposed = [endpoint for endpoint in self.endpoints if not endpoint.is_loopback]
        if self.credentials is not None and self.tls is None and exposed:
            raise RefusedInput([f"endpoint {exposed[0]}: a password needs TLS; give the CA's file"])


def parse_endpoints(text: str) -> tuple[Endpoint, ...]:
    """Return the endpoints of "host:port[,host:port…]"; the port is 2379 where none is given.

    Raises:
        RefusedInput: One line for each part that is no address.
    """
    parts = [part.strip() for part in text.split(",")]
    problems = [f"endpoint {part!r}: {problem}" for part in parts if (problem := _problem_of(part))]
    if problems:
        raise RefusedInput(problems)
    return tuple(Endpoint(host, int(port or DEFAULT_PORT)) for host, port in map(_split, parts))


def _problem_of(part: str) -> str:
    if not part:
        return "is empty; write host:port"
    if "://" in part:
        return "has a scheme; write host:port, and give the CA file to use TLS"
    host, port = _split(part)
    if not host or any(character.isspace() or character == "/" for character in host):
        return "has no valid host; write host:port"
    if ":" in host and not _is_ipv6(host):
        return "has more than one colon; write host:port, an IPv6 address as [address]:port"
    if port and not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        return f"port {port!r} is not a number from 1 to 65535"
    return ""


def _split(part: str) -> tuple[str, str]:
    if part.startswith("["):
        host, _, rest = part[1:].partition("]")
        return host, rest.removeprefix(":")
    if part.count(":") > 1:
        return part, ""
    host, _, port = part.partition(":")
    return host, port


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False
