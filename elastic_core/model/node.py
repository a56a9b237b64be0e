"""A node as the rendezvous sees it: the record that lives under the node's lease."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_core.ids import LeaseId, NodeId


class NodePhase(StrEnum):
    """What a node can do now."""

    WARMING = "warming"
    """Registered, but its workers are not set up yet: it must not be waited for."""
    READY = "ready"
    """Can enter a generation at once (or is in one)."""
    DRAINING = "draining"
    """Leaves on purpose: the next generation is formed without it."""
    SUCCEEDED = "succeeded"
    """Its workers of `generation` ended well; it waits for the others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """What an agent says of its node; written by that agent only.

    Attributes:
        address: Where the other nodes reach this one.
        probe_port: UDP port that answers probes.
        probe_token: A probe must carry it, so that a stranger's packet is not answered.
        master_port: Port reserved for the store of the next generation in which this node is first.
        slots: Workers on this node.
        lease: The lease that this record lives on; revoking it fences the node.
        generation: Newest generation that the agent acts on; 0 before the first.
        broken: Newest generation whose collectives broke under this node's workers; 0 for none.
        failed: Newest generation in which a worker of this node failed; 0 for none.
        step: Last finished step, for people and reports only.
        notice: Why its provider takes the node away, as it announced it; "" if it did not.
    """

    node_id: NodeId
    address: str
    probe_port: int
    probe_token: str
    master_port: int
    slots: int
    lease: LeaseId
    phase: NodePhase = NodePhase.WARMING
    generation: int = 0
    broken: int = 0
    failed: int = 0
    step: int = 0
    notice: str = ""
