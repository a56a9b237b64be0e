"""The coordinator: when a run gets a new generation, with which nodes, and why.

One mutator, no input or output: a driver delivers events, performs the commands
and keeps one timer. All of its memory can be rebuilt from the store at any time,
so the agent that runs it may die after any write.
"""

from __future__ import annotations

from collections import deque

from elastic_core.errors import IllegalEvent
from elastic_core.rendezvous.decision import Decision
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    CoordinatorEvent,
    CoordinatorPolicy,
    FailureReported,
    FenceNode,
    NodeAnswered,
    NodeGone,
    NodeSeen,
    ProbeNodes,
    PublishGeneration,
    StopRequested,
    StoreView,
    TargetChanged,
    TimeAdvanced,
    Wait,
    WakeAt,
)
from elastic_core.rendezvous.rules import decide
from elastic_core.rendezvous.situation import Situation

STORY = 20
"""Events that an error about an impossible one shows."""


class Coordinator:
    """Decide for one run, from the moment its node took the leader key."""

    def __init__(self, policy: CoordinatorPolicy, view: StoreView, now: float) -> None:
        """Take over what the store holds; `TimeAdvanced` must be the first event.

        Args:
            policy: The bounds and waits of the run.
            view: The store's state, read after the leader key was won.
            now: Monotonic seconds of the driver, as in `handle`.
        """
        self._situation = Situation(policy, view, now)
        self._situation.update_clocks(now)
        self._story: deque[CoordinatorEvent] = deque(maxlen=STORY)
        self._wake_at: float | None = None
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why nothing happens now, or what is happening; for the driver's repeated line."""
        return self._reason

    @property
    def situation(self) -> Situation:
        """What is known now: to be read only, by status lines and tests."""
        return self._situation

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorCommand]:
        """Take in one fact and return what is to be done about it, in order.

        Raises:
            IllegalEvent: A commit succeeded that was not asked for; nothing has changed.
        """
        self._apply(event, now)
        self._story.append(event)
        self._situation.update_clocks(now)
        decision = decide(self._situation, now)
        for command in decision.commands:
            self._note(command, now)
        return [*decision.commands, *self._next_wait(decision)]

    def _apply(self, event: CoordinatorEvent, now: float) -> None:
        situation = self._situation
        match event:
            case NodeSeen(record=record, joined=joined):
                situation.see(record, joined)
            case NodeGone(node_id=node_id):
                situation.lose(node_id)
            case NodeAnswered(node_id=node_id):
                situation.answer(node_id)
            case FailureReported(failure=failure):
                situation.report(failure)
            case TargetChanged(target=target):
                situation.aim(target)
            case StopRequested(reason=reason):
                situation.request_stop(reason, now)
            case CommitSucceeded():
                self._install(event, now)
            case CommitFailed(view=view):
                situation.adopt(view, now)
            case TimeAdvanced():
                self._wake_at = None

    def _install(self, event: CommitSucceeded, now: float) -> None:
        publishing = self._situation.publishing
        if publishing is None or publishing.generation.number != event.number:
            story = [repr(earlier) for earlier in self._story]
            raise IllegalEvent(state=self._reason, event=event, story=story)
        self._situation.install(publishing.entry, event.revision, now)

    def _note(self, command: CoordinatorCommand, now: float) -> None:
        """Remember what was asked for, as it is a fact for the next decision."""
        situation = self._situation
        match command:
            case PublishGeneration():
                situation.publishing = command
            case CloseRun(closed=closed):
                situation.closing = closed
            case ProbeNodes():
                situation.note_probe(now)
            case FenceNode(node_id=node_id):
                situation.note_fence(node_id, now)

    def _next_wait(self, decision: Decision) -> list[CoordinatorCommand]:
        """Say when to come back and why it waits, each only if it differs from what was said."""
        said: list[CoordinatorCommand] = []
        if decision.until is not None and decision.until != self._wake_at:
            said.append(WakeAt(at=decision.until))
            self._wake_at = decision.until
        if decision.reason != self._reason:
            said.append(Wait(reason=decision.reason, facts=self._facts()))
            self._reason = decision.reason
        return said

    def _facts(self) -> tuple[tuple[str, str], ...]:
        situation = self._situation
        return (
            ("generation", str(situation.number)),
            ("ready", str(len(situation.ready))),
            ("seen", str(len(situation.nodes))),
        )
