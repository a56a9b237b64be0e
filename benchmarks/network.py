"""Nodes with a network of their own, so that one can be cut off: namespaces behind a bridge, for root only.

The bridge lies in a namespace, too: the machine's own packet filter has no say in
what its nodes tell each other, and nothing of the machine's is changed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence

TOOLS = ("ip", "iptables")


class Network:
    """Nodes on this machine's loopback: nobody can be cut off."""

    can_cut = False
    host = "127.0.0.1"
    """Where the store listens."""

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is left."""

    def attach(self, name: str) -> tuple[str, ...]:  # noqa: ARG002
        """Return what stands before a node's command."""
        return ()

    def cut(self, name: str, others: Sequence[str], *, store: bool) -> None:
        """Let nothing pass between a node and others, or the store, without a word to either."""
        raise NotImplementedError("loopback cannot be cut")

    def heal(self) -> None:
        """Let everything pass again."""


class Namespaces(Network):
    """A network namespace for each node."""

    can_cut = True

    def __init__(self) -> None:
        number = secrets.randbelow(250) + 1
        self._name = f"et{number}x{secrets.token_hex(1)}"
        self._subnet = f"10.199.{number}"
        self.host = f"{self._subnet}.1"
        self._addresses: dict[str, str] = {}

    def __enter__(self) -> Namespaces:
        switch, port = f"{self._name}-sw", f"{self._name}h"
        try:
            _ip("netns", "add", switch)
            _ip("-n", switch, "link", "add", "br0", "type", "bridge")
            _ip("-n", switch, "link", "set", "br0", "up")
            _ip("link", "add", port, "type", "veth", "peer", "name", "host", "netns", switch)
            _ip("-n", switch, "link", "set", "host", "master", "br0", "up")
            _ip("addr", "add", f"{self.host}/24", "dev", port)
            _ip("link", "set", port, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Remove everything."""
        for name in (*self._addresses, "sw"):
            with contextlib.suppress(subprocess.CalledProcessError):
                _ip("netns", "del", f"{self._name}-{name}")
        with contextlib.suppress(subprocess.CalledProcessError):  # it goes with its peer, if it was made
            _ip("link", "del", f"{self._name}h")

    def attach(self, name: str) -> tuple[str, ...]:
        """Make a node's namespace, and return what runs a command in it."""
        own, switch = f"{self._name}-{name}", f"{self._name}-sw"
        if name not in self._addresses:
            number = len(self._addresses) + 10
            self._addresses[name] = f"{self._subnet}.{number}"
            _ip("netns", "add", own)
            _ip(
                "-n",
                own,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"n{number}",
                "netns",
                switch,
            )
            _ip("-n", switch, "link", "set", f"n{number}", "master", "br0", "up")
            _ip("-n", own, "addr", "add", f"{self._addresses[name]}/24", "dev", "eth0")
            for device in ("eth0", "lo"):
                _ip("-n", own, "link", "set", device, "up")
        return ("ip", "netns", "exec", own)

    def cut(self, name: str, others: Sequence[str], *, store: bool) -> None:
        """Drop packets where they arrive, and for the store also where they leave: it is not ours."""
        for other in others:
            self._filter(name, "-A", "INPUT", "-s", self._addresses[other], "-j", "DROP")
            self._filter(other, "-A", "INPUT", "-s", self._addresses[name], "-j", "DROP")
        if store:
            self._filter(name, "-A", "INPUT", "-s", self.host, "-j", "DROP")
            self._filter(name, "-A", "OUTPUT", "-d", self.host, "-j", "DROP")

    def heal(self) -> None:
        """Drop no packets."""
        for name in self._addresses:
            self._filter(name, "-F")

    def _filter(self, name: str, *rule: str) -> None:
        _ip("netns", "exec", f"{self._name}-{name}", "iptables", "-w", *rule)


def network() -> Network:
    """Return nodes that can be cut off where this process may make them, else nodes on loopback."""
    if os.geteuid() == 0 and all(map(shutil.which, TOOLS)):
        probe = f"et-probe-{secrets.token_hex(3)}"
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "add", probe)
            _ip("netns", "del", probe)
            return Namespaces()
    return Network()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
