"""A decision of the coordinator, and the words in which decisions give their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from elastic_core.ids import NodeId
from elastic_core.model.failure import bound
from elastic_core.model.membership import Closed, Outcome
from elastic_core.rendezvous.events import CloseRun, CoordinatorCommand

MAX_REASON: Final = 400
"""Characters of a reason: every node reads it with `current`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now and why; without commands it is a wait.

    Attributes:
        until: When to decide again if nothing happens; None: only a named event matters.
    """

    reason: str
    commands: tuple[CoordinatorCommand, ...] = ()
    until: float | None = None


def nodes_of(count: int) -> str:
    """Return a number of nodes in words."""
    return "1 node" if count == 1 else f"{count} nodes"


def name_some(names: Iterable[NodeId]) -> str:
    """Return the first three names, and how many more there are."""
    shown = sorted(names)
    more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(shown[:3]) + more


def close_run(outcome: Outcome, exit_code: int, reason: str) -> Decision:
    """Return the decision that ends the run."""
    closed = Closed(outcome=outcome, exit_code=int(exit_code), reason=bound(reason, MAX_REASON))
    return Decision(reason=describe_end(closed), commands=(CloseRun(closed=closed),))


def describe_end(closed: Closed) -> str:
    """Return the reason of the decision that ends the run."""
    return f"closing ({closed.outcome}): {closed.reason}"
