"""What runs hold where: found by process record, label or tag, whether or not anybody still knows of it.

Finding needs no memory of what was started. Each place tells what it has, and ends what it is asked to.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Protocol

from elastic_core.ids import RunId
from tasks.process import ProcessIdentity, end, is_running, marked, with_argument_below
from tasks.providers.local import NODE_MARK

GRACE_S: Final = 5.0
"""Between SIGTERM, at which an agent saves and leaves, and SIGKILL."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """One thing that a run has: a node, its etcd, a network.

    Attributes:
        place: Where it is: local, docker or aws.
        kind: agent, etcd, container, network, volume or instance.
        name: Unique among its kind, in its place's own words.
        has_expired: Whether the time that it was given is over.
        is_foreign: Whether another runs directory may own it: what is not known here is then no orphan.
    """

    place: str
    kind: str
    name: str
    run: RunId
    detail: str = ""
    has_expired: bool = False
    is_foreign: bool = False


class Place(Protocol):
    """Where runs have things."""

    @property
    def name(self) -> str:
        """How people call it."""
        ...

    def find(self) -> Sequence[Holding]:
        """Return all that any run has here.

        Raises:
            ProviderError: The place does not answer.
        """
        ...

    def remove(self, holdings: Sequence[Holding]) -> dict[str, str]:
        """End these; return the name and reason of each that is still there. Gone already is no error."""
        ...


class LocalPlace:
    """Processes of this machine: nodes by the mark in their environment, etcd by its data's path."""

    name = "local"

    def __init__(self, runs: Path) -> None:
        self._runs = runs.absolute()
        self._found: dict[str, list[ProcessIdentity]] = {}

    def find(self) -> Sequence[Holding]:
        """Return nodes and etcd servers whose records lie below this runs directory."""
        self._found.clear()
        found: dict[str, Holding] = {}
        below = f"{self._runs}/"
        nodes = [(process, value) for process, value in marked(NODE_MARK) if value.startswith(below)]
        for holding, process in (
            *_read(nodes, below, "agent", "nodes"),
            *_read(with_argument_below(self._runs), "", "etcd", "data"),
        ):
            found.setdefault(holding.name, holding)
            self._found.setdefault(holding.name, []).append(process)
        for name, processes in self._found.items():
            processes.sort(key=lambda process: (process.start_ticks, process.pid))
            pids = ", ".join(str(process.pid) for process in processes)
            found[name] = replace(found[name], detail=f"process{'es' * (len(processes) > 1)} {pids}")
        return [found[name] for name in sorted(found)]

    def remove(self, holdings: Sequence[Holding]) -> dict[str, str]:
        """End nodes by their agents, which save and leave; then what is left of them, then etcd."""
        for kind in ("agent", "etcd"):
            names = [holding.name for holding in holdings if holding.kind == kind]
            end([self._found[name][0] for name in names], GRACE_S)
            end([process for name in names for process in self._found[name]], 0)
        return {
            holding.name: "still runs"
            for holding in holdings
            if any(map(is_running, self._found[holding.name]))
        }


def _read(
    found: Iterable[tuple[ProcessIdentity, str]], below: str, kind: str, marker: str
) -> Iterable[tuple[Holding, ProcessIdentity]]:
    """Yield holdings of paths `<run>/nodes/<node>.json` and `<run>/etcd-<n>/data`."""
    for process, path in found:
        parts = Path(path.removeprefix(below)).parts
        if len(parts) == 3 and marker in (parts[1], parts[2]):
            name = parts[2].removesuffix(".json") if marker == parts[1] else parts[1]
            run = RunId(parts[0])
            yield Holding(place="local", kind=kind, name=f"{run}/{name}", run=run), process
