"""A real etcd cluster on this machine: members to kill, freeze and depose."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Self

from elastic_core.errors import StoreError
from elastic_core.store.endpoint import TlsFiles
from elastic_core.store.server import EtcdOptions, EtcdServer, free_port
from elastic_core.testing.etcd_console import EtcdConsole

_SETTLE_S: Final = 60.0
_POLL_S: Final = 0.05


class EtcdCluster:
    """Three members, or as many as are asked for.

    Attributes:
        members: The servers by name.
        tls: Files by which all of them are spoken to.
    """

    def __init__(
        self,
        directory: Path,
        *,
        size: int = 3,
        host: str = "127.0.0.1",
        tls: TlsFiles | None = None,
        token_ttl_s: int = 300,
    ) -> None:
        """Prepare members that keep their data in `directory` and listen for clients at `host`."""
        self.tls = tls
        ports: dict[str, int] = {}
        while len(ports) < size:
            port = free_port("127.0.0.1")
            if port not in ports.values():
                ports[f"member-{len(ports) + 1}"] = port
        self.members: Mapping[str, EtcdServer] = {
            name: EtcdServer(
                directory / name,
                EtcdOptions(
                    host=host,
                    tls=tls,
                    name=name,
                    members=ports,
                    token_ttl_s=token_ttl_s,
                    ends_with_parent=True,
                    start_timeout_s=_SETTLE_S,
                ),
            )
            for name in ports
        }
        self._ids: dict[int, str] = {}

    @property
    def endpoints(self) -> str:
        """All members' endpoints, as clients are given them."""
        return ",".join(server.endpoint for server in self.members.values())

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        self._ids = {self.console(name).status().member: name for name in self.members}
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start all members that do not run, with their data, and return when they answer."""
        for server in self.members.values():
            server.launch()
        for server in self.members.values():
            server.await_answer()

    def stop(self) -> None:
        """End all members, as a power cut would."""
        for server in self.members.values():
            server.kill()

    def console(self, name: str, *, user: str = "", password: str = "") -> EtcdConsole:
        """Return what asks one member."""
        return EtcdConsole(self.members[name].endpoint, tls=self.tls, user=user, password=password)

    def leader(self) -> str:
        """Return the leader's name as soon as the members that run agree on one.

        Raises:
            TimeoutError: They do not within a minute.
        """
        deadline = time.monotonic() + _SETTLE_S
        while time.monotonic() < deadline:
            running = [name for name, server in self.members.items() if server.pid]
            leaders = set()
            with contextlib.suppress(StoreError):
                leaders = {self.console(name).status().leader for name in running}
            if len(leaders) == 1 and (name := self._ids.get(leaders.pop(), "")) in running:
                return name
            time.sleep(_POLL_S)
        raise TimeoutError("the members agree on no leader")

    def move_leader(self, heir: str = "") -> str:
        """Hand the leadership to a member, by default to any other that runs; return its name."""
        before = self.leader()
        heir = heir or next(name for name, server in self.members.items() if server.pid and name != before)
        if heir != before:
            number = next(number for number, name in self._ids.items() if name == heir)
            self.console(before).move_leader(number)
        return heir
