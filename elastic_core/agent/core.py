"""The agent's machine: facts in, commands out, by the table of `elastic_core.agent.table`.

It reads no clock and touches nothing; a driver delivers events, performs commands
and keeps one timer. `python -m elastic_core.agent.core` prints its diagram.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator

from elastic_core.agent.events import AgentCommand, AgentEvent, AgentPolicy, Registered, WorkerSpoke
from elastic_core.agent.memory import AgentMemory
from elastic_core.agent.table import ROWS, TABLE, AgentState, Row
from elastic_core.errors import IllegalEvent

STORY = 20
"""Events that an error about an impossible one shows."""


class AgentCore:
    """Decide for one node, from its start to its exit code."""

    def __init__(self, policy: AgentPolicy) -> None:
        """Begin; `AgentStarted`, or the outcome of a run that is over, is the first event."""
        self._memory = AgentMemory(policy=policy)
        self._state = AgentState.REGISTERING
        self._story: deque[str] = deque(maxlen=STORY)
        self._taken: Row | None = None

    @property
    def taken(self) -> Row | None:
        """The row that the last fact took, None if it meant nothing."""
        return self._taken

    @property
    def state(self) -> AgentState:
        """Where the agent stands."""
        return self._state

    @property
    def memory(self) -> AgentMemory:
        """What the agent remembers; to be read only."""
        return self._memory

    def handle(self, event: AgentEvent, now: float) -> list[AgentCommand]:
        """Take in one fact and return what is to be done about it, in order.

        Raises:
            IllegalEvent: The table does not have such a fact in this state; nothing has changed.
        """
        fact = type(event.message) if isinstance(event, WorkerSpoke) else type(event)
        rows = TABLE.get((self._state, fact))
        if rows is None:
            raise IllegalEvent(state=self._state, event=event, story=tuple(self._story))
        before = self._state
        self._memory.note(event)
        if isinstance(event, Registered):
            self._memory.node_id = event.node_id
        row = self._taken = self._first_that_holds(rows, event, now)
        commands = row.action(self._memory, event, now) if row else []
        self._state = row.next if row else before
        self._story.append(f"{now:.3f} {before} {event!r} -> {self._state}")
        return commands

    def _first_that_holds(self, rows: tuple[Row, ...], event: AgentEvent, now: float) -> Row | None:
        for row in rows:
            if row.guard is None or row.guard(self._memory, event, now):
                return row
        return None


def diagram() -> str:
    """Return the table as a Mermaid state diagram; loops that do nothing are left out."""
    return "\n".join(["stateDiagram-v2", f"    [*] --> {AgentState.REGISTERING}", *_arrows()])


def _arrows() -> Iterator[str]:
    labels: dict[tuple[AgentState, AgentState], list[str]] = {}
    for row in ROWS:
        if row.next is not row.state or row.action.__name__ not in ("nothing", "pass_on"):
            guard = f" [{row.guard.__name__}]" if row.guard else ""
            label = f"{row.fact.__name__}{guard} / {row.action.__name__}"
            labels.setdefault((row.state, row.next), []).append(label)
    for (state, following), texts in labels.items():
        yield from (f"    {state} --> {following}: {text}" for text in dict.fromkeys(texts))
    yield f"    {AgentState.ENDED} --> [*]"


if __name__ == "__main__":
    sys.stdout.write(diagram() + "\n")
