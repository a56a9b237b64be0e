"""What was asked of a provider: the memory that bridges the time until a node can be listed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from elastic_core.cluster.provider import Instance, LaunchResult


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRecord:
    """One launch.

    Attributes:
        count: Nodes asked for.
        lost: How many of them replace nodes that are lost or were refused before; the others let
            the cluster grow.
        wanted: Nodes that the plan wanted then.
        asked_at: Monotonic time of the last call with this token.
        calls: How often it was called.
        awaited: Names that were granted and not listed yet; None: no answer came, and the same
            token must be used again.
        shortfall: Nodes that the provider did not have.
    """

    token: str
    count: int
    lost: int
    wanted: int
    asked_at: float
    calls: int = 1
    awaited: frozenset[str] | None = None
    shortfall: int = 0

    @property
    def spent(self) -> int:
        """Replacements that this launch used up; nodes that the provider did not have cost nothing."""
        return max(self.lost - self.shortfall, 0)

    def pending(self, now: float, patience: float) -> int:
        """Return how many of its nodes may still appear."""
        if self.awaited is None:
            return self.count
        return len(self.awaited) if now < self.asked_at + patience else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchLog:
    """All launches of one reconciling process, oldest first; a value, replaced by each change.

    Attributes:
        owner: Begins every token. Another process (a later attempt, a flow that adopted the run)
            must have another owner: a token that was used before launches nothing.
    """

    owner: str
    records: tuple[LaunchRecord, ...] = ()

    def next_token(self) -> str:
        """Return a token that no launch of this log had."""
        return f"{self.owner}-{len(self.records) + 1}"

    def find(self, token: str) -> LaunchRecord | None:
        """Return the launch with this token."""
        return next((record for record in self.records if record.token == token), None)

    def asked(self, record: LaunchRecord) -> LaunchLog:
        """Note a call before it is made, so that a call without an answer is remembered too."""
        known = self.find(record.token)
        if known is None:
            return replace(self, records=(*self.records, record))
        return self._replaced(replace(known, asked_at=record.asked_at, calls=known.calls + 1))

    def answered(self, token: str, result: LaunchResult) -> LaunchLog:
        """Note what came of a call; a refusal is a result without nodes.

        Raises:
            KeyError: No launch has this token.
        """
        known = self.find(token)
        if known is None:
            raise KeyError(token)
        names = frozenset(instance.name for instance in result.launched)
        return self._replaced(replace(known, awaited=names, shortfall=result.shortfall))

    def noticed(self, observed: Iterable[Instance]) -> LaunchLog:
        """Take off what the provider lists now: from here on its word is the truth."""
        listed = {instance.name for instance in observed}
        records = tuple(
            replace(record, awaited=record.awaited - listed) if record.awaited else record
            for record in self.records
        )
        return replace(self, records=records)

    def lost_since(self, moment: float) -> tuple[LaunchRecord, ...]:
        """Return the launches that replaced lost nodes after `moment`."""
        return tuple(record for record in self.records if record.lost and record.asked_at > moment)

    def _replaced(self, changed: LaunchRecord) -> LaunchLog:
        records = tuple(changed if record.token == changed.token else record for record in self.records)
        return replace(self, records=records)
