"""Nodes that run for their provider, and whose agents nobody hears: frozen, hung at boot, dead within.

A lease decides whether a node is a member; what a provider calls running says only that it costs
money. Such a node is ended after a while, so that another one can take its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.planning.reconciliation import Terminate

SILENT_S: Final = 180.0
"""An agent that was heard before and is silent for so long does not come back; a pause of etcd is shorter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Silence:
    """Since when running nodes are silent; a value, replaced at each look.

    Attributes:
        since: Monotonic time of the first look at which a node ran and its agent was not registered.
        heard: Nodes whose agents were registered once.
    """

    since: Mapping[str, float] = field(default_factory=dict)
    heard: frozenset[str] = frozenset()

    def noticed(self, observed: Iterable[Instance], registered: Collection[str], now: float) -> Silence:
        """Take in a look: what the provider lists, and the instances whose agents are in the store."""
        running = {one.name for one in observed if one.state is InstanceState.RUNNING}
        silent = running - set(registered)
        return Silence(
            since={name: self.since.get(name, now) for name in sorted(silent)},
            heard=(self.heard | set(registered)) & running,
        )

    def overdue(self, now: float, *, boot_s: float) -> tuple[Terminate, ...]:
        """Return the ends of those that were silent for too long.

        Args:
            now: Monotonic seconds.
            boot_s: An agent that was never heard may take so long to come: machine, image and imports.
        """
        ends = []
        for name, since in self.since.items():
            if name in self.heard and now - since >= SILENT_S:
                ends.append(_end(name, "its agent is silent", now - since))
            elif name not in self.heard and now - since >= boot_s:
                ends.append(_end(name, "its agent never came", now - since))
        return tuple(ends)


def _end(name: str, why: str, seconds: float) -> Terminate:
    return Terminate(names=(name,), reason=f"it runs, and {why} for {seconds:.0f} s")
