"""The watch loop of a run: event-driven, in the flow's main thread, and free of Prefect.

It reads the store and the provider, replaces lost nodes, passes on requests to
stop, and ends when the run is closed. It never waits for an API: whoever shows
the run elsewhere gets snapshots.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final, Protocol, Self

from elastic_core.cluster.provider import Instance, InstanceState, NodeProvider
from elastic_core.errors import ElasticError
from elastic_core.exits import ExitCode
from elastic_core.model.codec import encode
from elastic_core.model.membership import Closed, Outcome, Stop, Target
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Modified, Put, Store
from tasks.agents import Attempt
from tasks.watch import Observation, RunWatch

TICK_S: Final = 1.0
STOP_DEADLINE_S: Final = 8.0
"""A stopped run saves its state within this, or it is ended without."""
LEAVE_DEADLINE_S: Final = 3.0
"""Agents of a closed run end by themselves within this."""

_ALIVE: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING})


class Fenced(ElasticError):
    """The server holds this flow run for ended: another one may drive the run, so this one stops acting."""


class Steering(Protocol):
    """What may tell the loop to stop (`flows.link.PrefectLink`)."""

    def wants_stop(self) -> bool:
        """Return whether somebody cancelled the flow run."""
        ...

    def is_foreign(self) -> bool:
        """Return whether this process must not act any more."""
        ...


class Supervision:
    """Drives one attempt of a run until it is closed; a context manager.

    Args:
        say: Told each decision, as one sentence.
        show: Shown the run after each change.
    """

    def __init__(
        self,
        attempt: Attempt,
        store: Store,
        provider: NodeProvider,
        *,
        say: Callable[[str], None],
        show: Callable[[Observation], None],
    ) -> None:
        self._attempt = attempt
        self._run = attempt.directory.run
        self._keys = RunKeys(self._run)
        self._store = store
        self._provider = provider
        self._say = say
        self._show = show
        self._watch = RunWatch(store, self._keys)
        self._instances: Sequence[Instance] = ()
        self._listed_at = float("-inf")

    def __enter__(self) -> Self:
        """Start following the store."""
        self._watch.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop following."""
        self._watch.__exit__(kind, error, trace)

    def wake(self) -> None:
        """Let the loop look up now; safe from any thread."""
        self._watch.wake()

    def until_closed(self, steering: Steering) -> Closed:
        """Keep the wanted nodes alive until the run is closed.

        Raises:
            Fenced: The steering says that this process must not act any more.
        """
        self._want_nodes(self._attempt.job.nodes.target)
        while True:
            observation = self._look()
            if observation.closed is not None:
                return observation.closed
            if steering.is_foreign():
                raise Fenced("this flow run was ended on the server; the nodes are left to whoever adopts them")
            if steering.wants_stop():
                return self.stop("the flow run was cancelled")
            if (given_up := self._reconcile(observation)) is not None:
                return given_up
            self._watch.wait(TICK_S)

    def stop(self, reason: str, deadline_s: float = STOP_DEADLINE_S) -> Closed:
        """Ask the agents to save and leave; return as soon as they did, or when the time is up."""
        self._say(f"stopping: {reason}; waiting up to {deadline_s:.0f} s for the saved state")
        self._store.put(self._keys.stop, encode(Stop(reason=reason)))
        deadline = time.monotonic() + deadline_s
        while (left := deadline - time.monotonic()) > 0:
            observation = self._look()
            if observation.closed is not None:
                return observation.closed
            if not self._alive():
                break
            self._watch.wait(min(left, 0.2))
        return Closed(outcome=Outcome.PREEMPTED, exit_code=ExitCode.PREEMPTED, reason=reason)

    def wait_left(self, deadline_s: float = LEAVE_DEADLINE_S) -> Observation:
        """Give the agents of a closed run time to end by themselves; return the last view."""
        deadline = time.monotonic() + deadline_s
        observation = self._look(fresh=True)
        while self._alive() and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(min(left, 0.1))
            observation = self._look(fresh=True)
        return observation

    def _want_nodes(self, count: int) -> None:
        """Write the first target; one that is there (a rescale, an adopted run) stays."""
        self._store.transact(
            [Modified(self._keys.target, NO_REVISION)],
            [Put(self._keys.target, encode(Target(nodes=count)))],
        )

    def _look(self, *, fresh: bool = False) -> Observation:
        now = time.monotonic()
        if fresh or now - self._listed_at >= TICK_S:
            self._instances = self._provider.list_nodes(self._run)
            self._listed_at = now
        observation = self._watch.observation(self._instances)
        self._show(observation)
        return observation

    def _alive(self) -> list[Instance]:
        return [instance for instance in self._instances if instance.state in _ALIVE]
