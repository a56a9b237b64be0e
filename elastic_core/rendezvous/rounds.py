"""When plain torchrun agents form a round, and who is in it.

A torchrun agent knows only two things: it waits for the next round (its record says
which one it was in last), or it runs one. There is no standby and no worker report, so
the rules are fewer than the coordinator's: a round is formed when all agents that are
alive wait, and those who run are recalled when one of them is lost or comes back, or
when a newcomer finds room.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_core.ids import NodeId
from elastic_core.model.membership import Cause
from elastic_core.model.node import NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPolicy:
    """The bounds of a run.

    Attributes:
        last_call: Seconds for which the first round stays open once enough agents wait.
    """

    min_nodes: int
    max_nodes: int
    last_call: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundView:
    """What the store says.

    Attributes:
        number: The newest round, 0 before the first.
        members: Its agents by rank.
        nodes: Records of all agents that are alive, in the order of their arrival. The
            `generation` of a record is the round its agent was in when it last began to wait.
    """

    number: int
    members: tuple[NodeId, ...]
    nodes: tuple[NodeRecord, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class FormRound:
    """Publish round `number` with these agents, by rank."""

    number: int
    members: tuple[NodeRecord, ...]
    cause: Cause
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RecallRound:
    """Tell the members of round `number` to come back: the next one is due."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AwaitAgents:
    """Nothing to do before something changes, or the time `until`."""

    reason: str
    until: float | None = None


RoundDecision = FormRound | RecallRound | AwaitAgents


class Rounds:
    """Decides for one run; remembers only since when enough agents wait."""

    def __init__(self, policy: RoundPolicy) -> None:
        self._policy = policy
        self._enough_since: float | None = None

    def decide(self, view: RoundView, now: float) -> RoundDecision:
        """Return what is to be done in this situation."""
        alive = {node.node_id: node for node in view.nodes}
        running = [name for name in view.members if name in alive and alive[name].generation < view.number]
        if running:
            self._enough_since = None
            return self._recall_or_wait(view, alive, running)
        return self._form_or_wait(view, alive, now)

    def _recall_or_wait(
        self, view: RoundView, alive: dict[NodeId, NodeRecord], running: list[NodeId]
    ) -> RoundDecision:
        lost = [name for name in view.members if name not in alive]
        back = [name for name in view.members if name in alive and name not in running]
        newcomers = [name for name in alive if name not in view.members]
        if lost:
            return RecallRound(number=view.number, reason=f"{lost[0]} is lost")
        if back:
            return RecallRound(number=view.number, reason=f"the workers of {back[0]} ended")
        if newcomers and len(running) < self._policy.max_nodes:
            return RecallRound(number=view.number, reason=f"{newcomers[0]} joins")
        return AwaitAgents(reason=f"{len(running)} nodes run round {view.number}")

    def _form_or_wait(self, view: RoundView, alive: dict[NodeId, NodeRecord], now: float) -> RoundDecision:
        policy = self._policy
        survivors = [alive[name] for name in view.members if name in alive]
        newcomers = [node for name, node in alive.items() if name not in view.members]
        waiting = survivors + newcomers
        if len(waiting) < policy.min_nodes:
            self._enough_since = None
            return AwaitAgents(reason=f"{len(waiting)} of at least {policy.min_nodes} nodes wait")
        if self._enough_since is None:
            self._enough_since = now
        due = self._enough_since + policy.last_call
        if len(waiting) < policy.max_nodes and not survivors and now < due:
            reason = f"{len(waiting)} of at most {policy.max_nodes} nodes wait: last call"
            return AwaitAgents(reason=reason, until=due)
        self._enough_since = None
        cause = _cause(view, alive, newcomers)
        members = tuple(waiting[: policy.max_nodes])
        reason = f"{cause.value}: {len(members)} nodes"
        return FormRound(number=view.number + 1, members=members, cause=cause, reason=reason)


def _cause(view: RoundView, alive: dict[NodeId, NodeRecord], newcomers: list[NodeRecord]) -> Cause:
    if view.number == 0:
        return Cause.START
    if any(name not in alive for name in view.members):
        return Cause.LOSS
    return Cause.JOIN if newcomers else Cause.FAILURE
