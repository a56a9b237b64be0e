"""Generations: the numbered agreements on who trains, and one node's part of them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from elastic_core.ids import NO_NODE, NodeId


class Cause(StrEnum):
    """Why a generation was formed. Without a cause there is none."""

    START = "start"
    """The first one, or the first after all nodes were lost."""
    JOIN = "join"
    """A node is ready, and there is room below target and maximum."""
    LOSS = "loss"
    """A node's lease ended, or it was fenced because it was silent."""
    DRAIN = "drain"
    """A node leaves on purpose: a signal, a notice of its provider, or the flow's wish."""
    RESCALE = "rescale"
    """The target is below the number of members."""
    FAILURE = "failure"
    """Workers failed and no lost node explains it: the only cause that spends a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A node within a generation.

    Attributes:
        group_rank: The node's number, 0..group_world_size-1.
        first_rank: Rank of its first worker; its ranks are first_rank..first_rank+slots-1.
    """

    node_id: NodeId
    address: str
    slots: int
    group_rank: int
    first_rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """One numbered, immutable agreement; the value of the `current` key.

    Attributes:
        number: Grows by one.
        restart_count: Failures so far, job-wide (never membership changes).
        master_address: Address of the first node; the generation's store listens there.
        reason: One sentence for people: what was decided and why.
    """

    number: int
    cause: Cause
    restart_count: int
    world_size: int
    group_world_size: int
    master_address: str
    master_port: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """One node's part of a generation; the value of `generations/{number}/{node_id}`.

    Attributes:
        successor: The node after this one in the ring in which neighbours watch each other, "" if alone.
    """

    number: int
    node_id: NodeId
    group_rank: int
    first_rank: int
    slots: int
    successor: NodeId = NO_NODE


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """How many nodes are wanted: the value of the `target` key, written by the flow or a rescale.

    Attributes:
        nodes: Nodes wanted in the next generation; a generation closes at once when so many are
            ready, and takes no more than so many.
        least: No generation of fewer is formed from now on; 0: the job's own minimum.
        most: What a later target may be at most; 0: the job's own maximum.
    """

    nodes: int
    least: int = 0
    most: int = 0


class Outcome(StrEnum):
    """How a run ended."""

    SUCCEEDED = "succeeded"
    """All that was to be trained is trained."""
    FAILED = "failed"
    """A failure that no restart could mend, or one beyond the budget."""
    PREEMPTED = "preempted"
    """Stopped on purpose, state saved: the next start goes on."""
    BELOW_MINIMUM = "below-minimum"
    """Too few nodes came within the join timeout."""
    NO_PROGRESS = "no-progress"
    """Failures followed each other without a new step between them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The end of a run; the value of the `closed` key. Closed stays closed.

    Attributes:
        exit_code: What agents and flow exit with (`elastic_core.exits`).
        reason: One sentence, with the first root cause where there is one.
    """

    outcome: Outcome
    exit_code: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """A request to end the run at the next step boundary; the value of `control/stop`."""

    reason: str
