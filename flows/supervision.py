"""The watch loop of a run: event-driven, in the flow's main thread, and free of Prefect.

It reads the store and the provider, replaces lost nodes, passes on requests to
stop, and ends when the run is closed. It never waits for an API: whoever shows
the run elsewhere gets snapshots.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from math import inf
from types import TracebackType
from typing import Final, Protocol, Self

from elastic_core.cluster.provider import Instance, InstanceState, LaunchResult
from elastic_core.errors import (
    ElasticError,
    InvalidRequest,
    LeaseLost,
    ProviderError,
    ProviderUnavailable,
    QuotaExceeded,
    RefusedInput,
)
from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.codec import encode
from elastic_core.model.membership import Closed, Outcome, Stop, Target
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import SlowWorker
from elastic_core.planning.crew import Crew, Keep
from elastic_core.planning.failing import exclude_failing
from elastic_core.planning.launches import LaunchLog
from elastic_core.planning.plan import plan_cluster
from elastic_core.planning.reconciliation import GiveUp, Hold, Launch, Terminate, reconcile
from elastic_core.planning.silence import SILENT_S, Silence
from elastic_core.planning.slowness import replace_slow
from elastic_core.rescale.decision import Rescale, decide, describe
from elastic_core.store.protocol import Store
from tasks.ownership import Ownership
from tasks.provision import ALIVE, Cluster
from tasks.watch import Observation, RunWatch

TICK_S: Final = 1.0
STOP_DEADLINE_S: Final = 8.0
"""A stopped run saves its state within this, or it is ended without."""
LEAVE_DEADLINE_S: Final = 3.0
"""Agents of a closed run end by themselves within this."""


class Fenced(ElasticError):
    """The server holds this flow run for ended: another one may drive the run, so this one stops acting."""


class Steering(Protocol):
    """What may tell the loop to stop (`flows.link.PrefectLink`)."""

    def stop_reason(self) -> str:
        """Return why somebody wants the run to stop, "" while nobody does."""
        ...

    def wishes(self) -> Sequence[Rescale]:
        """Return the sizes that somebody asked for since the last call."""
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
        cluster: Cluster,
        store: Store,
        *,
        say: Callable[[str], None],
        show: Callable[[Observation], None],
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._say = say
        self._show = show
        self._watch = RunWatch(store, cluster.keys)
        self._instances: Sequence[Instance] = cluster.instances()
        # What ended before this loop began is history: it is not replaced, and slows nothing down.
        self._bygone = {instance.name for instance in self._instances if instance.state not in ALIVE}
        self._ended: set[str] = set()
        self._registered: set[NodeId] = set()
        self._listed_at = float("-inf")
        self._ending = self._hurried = False
        self._said = ""
        self._paces: list[SlowWorker] = []
        self._drained: set[NodeId] = set()
        self._silence = Silence()
        self._plan = plan_cluster(cluster.attempt.job)
        # Tokens of this process only: what another one asked for is seen in the provider's list.
        self._log = LaunchLog(owner=f"{cluster.attempt.number}-{secrets.token_hex(4)}")

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

    def hear_signal(self) -> None:
        """Look up now; while the run is ended, wait no longer for agents that save or leave."""
        self._hurried = self._ending
        self._watch.wake()

    def until_closed(self, steering: Steering, ownership: Ownership, deadline: float = inf) -> Closed:
        """Keep the wanted nodes alive until the run is closed.

        Args:
            steering: May tell us to stop.
            ownership: The right to write for the run.
            deadline: Monotonic time at which the run is stopped, resumable.

        Raises:
            Fenced: This process must not act any more.
        """
        while True:
            observation = self._look()
            if observation.closed is not None:
                return observation.closed
            if steering.is_foreign() or ownership.is_lost():
                raise Fenced("this flow run is over; the nodes are left to the flow that drives the run now")
            if reason := steering.stop_reason():
                return self.stop(reason)
            if time.monotonic() >= deadline:
                return self.stop("the time limit was reached")
            try:
                self._follow(steering.wishes(), observation, ownership)
                self._mind_the_ill(observation, ownership)
                given_up = self._tend(observation, ownership)
            except LeaseLost as error:
                raise Fenced(str(error)) from error
            if given_up is not None:
                return given_up
            self._watch.wait(min(TICK_S, max(deadline - time.monotonic(), 0)))

    def stop(self, reason: str) -> Closed:
        """Ask the agents to save and leave; return as soon as they did, or when the time is up."""
        self._ending = True
        self._say(f"stopping: {reason}; the state is saved first (at most {STOP_DEADLINE_S:.0f} s)")
        self._store.put(self._cluster.keys.stop, encode(Stop(reason=reason)))
        deadline = time.monotonic() + STOP_DEADLINE_S
        while (left := deadline - time.monotonic()) > 0 and not self._hurried:
            observation = self._look(fresh=True)
            if observation.closed is not None:
                return observation.closed
            if not self._alive():
                break
            self._watch.wait(min(left, 0.2))
        self._hurried = True  # the time for a graceful end is used up
        return Closed(outcome=Outcome.PREEMPTED, exit_code=ExitCode.PREEMPTED, reason=f"stopped: {reason}")

    def wait_left(self) -> Observation:
        """Give the agents of a closed run time to end by themselves; return the last view."""
        self._ending = True
        self._cluster.note_end()
        deadline = time.monotonic() + LEAVE_DEADLINE_S
        observation = self._look(fresh=True)
        while self._alive() and not self._hurried and (left := deadline - time.monotonic()) > 0:
            self._watch.wait(min(left, 0.1))
            observation = self._look(fresh=True)
        return observation

    # ---- keeping what the job wants ----------------------------------------------------------

    def _tend(self, seen: Observation, ownership: Ownership) -> Closed | None:
        """Bring store and nodes to the plan; return an end if that is hopeless."""
        if restarted := self._cluster.tend():
            self._say(restarted)
        if seen.target is None:
            target = Target(nodes=self._plan.nodes)
            ownership.write_new(self._cluster.keys.target, encode(target))
        else:
            self._plan = self._plan.resized(seen.target.nodes)
        members = {instance_of(member.node_id) for entry in seen.history[-1:] for member in entry.members}
        now = time.monotonic()
        instances = [instance for instance in seen.instances if instance.name not in self._bygone]
        self._log = self._log.noticed(instances)
        registered = {instance_of(record.node_id) for record in seen.nodes}
        self._silence = self._silence.noticed(instances, registered, now)
        boot_s = max(self._cluster.attempt.job.timeouts.join, SILENT_S)
        for action in (
            *self._silence.overdue(now, boot_s=boot_s),
            *reconcile(self._plan, instances, log=self._log, members=members, now=now),
        ):
            if isinstance(action, GiveUp):
                return _hopeless(action)
            self._perform(action)
        return None

    def _mind_the_ill(self, seen: Observation, ownership: Ownership) -> None:
        """Drain a node that keeps failing, or that is slow where the job wants such a one replaced."""
        for found in seen.slow:
            if found not in self._paces:
                self._paces.append(found)
                self._say(found.headline())
        health = self._cluster.attempt.job.health
        alive = {record.node_id: record.phase for record in seen.nodes}
        enlisted = {member.node_id for entry in seen.history[-1:] for member in entry.members}
        members = enlisted & alive.keys()
        ready = {node_id for node_id, phase in alive.items() if phase is NodePhase.READY}
        leaving = {node for node in members - ready if alive[node] is NodePhase.DRAINING}
        crew = Crew(
            members=members,
            standbys=len(ready - members),
            leaving=leaving | (self._drained & members),
            least=self._plan.min_nodes,
        )
        action = exclude_failing(seen.failures, crew, after=health.exclude_after)
        if action is None and health.slow_node == "replace":
            action = replace_slow(seen.slow, crew)
        if isinstance(action, Keep):
            self._say_once(action.reason)
        elif action is not None and ownership.write(
            self._cluster.keys.drain(action.node_id), action.reason.encode()
        ):
            self._drained.add(action.node_id)
            self._say(f"draining {action.node_id}: {action.reason}")

    def _follow(self, wishes: Sequence[Rescale], seen: Observation, ownership: Ownership) -> None:
        """Write the targets that wishes lead to; a wish outside the job's limits is refused in one line."""
        held = seen.target or Target(nodes=self._plan.nodes)
        for wish in wishes:
            try:
                target = decide(wish, self._cluster.attempt.job.nodes, held)
            except RefusedInput as refusal:
                self._say(f"a rescale was refused: {'; '.join(refusal.problems)}")
                continue
            if ownership.write(self._cluster.keys.target, encode(target)):
                self._say(f"rescale: {describe(held, target)}")
                held = target
            else:
                self._say("a rescale was dropped, for the store stood still: ask again")

    def _perform(self, action: Launch | Terminate | Hold) -> None:
        match action:
            case Launch(record=record, reason=reason):
                self._say_once(f"launching {record.count} node{'s' * (record.count > 1)}: {reason}")
                self._log = self._log.asked(record)
                try:
                    result = self._cluster.launch(record.token, record.count)
                except ProviderUnavailable as error:  # no answer: the same token is used again later
                    self._say_once(f"no answer from the provider: {error}")
                    return
                except ProviderError as error:
                    # What can never succeed is the run's end where nothing trains; else training goes on.
                    if isinstance(error, InvalidRequest | QuotaExceeded) and not self._alive():
                        raise
                    self._say_once(f"the provider refused: {error}")
                    result = LaunchResult(launched=(), shortfall=record.count, reason=str(error))
                self._log = self._log.answered(record.token, result)
                self._listed_at = float("-inf")
            case Terminate(names=names, reason=reason):
                self._say_once(f"ending {', '.join(names)}: {reason}")
                self._cluster.terminate(names)
                self._listed_at = float("-inf")
            case Hold(reason=reason):
                self._say_once(reason)

    def _say_once(self, sentence: str) -> None:
        """Say it unless it was the last thing said here: a reason that holds is told once."""
        if sentence != self._said:
            self._said = sentence
            self._say(sentence)

    def _look(self, *, fresh: bool = False) -> Observation:
        now = time.monotonic()
        observation = self._watch.observation(self._instances)
        registered = {record.node_id for record in observation.nodes}
        if fresh or registered != self._registered or now - self._listed_at >= TICK_S:
            self._registered, self._listed_at = registered, now
            self._instances = self._cluster.instances()
            self._tell_ends()
            observation = self._watch.observation(self._instances)
        self._show(observation)
        return observation

    def _tell_ends(self) -> None:
        """Say why nodes ended, once each, where the provider knows."""
        for instance in self._instances:
            told = instance.name in self._ended or instance.name in self._bygone
            if instance.state is InstanceState.ENDED and not told:
                self._ended.add(instance.name)
                if instance.detail:
                    self._say(f"{instance.name} ended: {instance.detail}")

    def _alive(self) -> list[Instance]:
        return [instance for instance in self._instances if instance.state in ALIVE]


def _hopeless(action: GiveUp) -> Closed:
    below = action.exit_code == ExitCode.BELOW_MINIMUM
    outcome = Outcome.BELOW_MINIMUM if below else Outcome.FAILED
    return Closed(outcome=outcome, exit_code=action.exit_code, reason=action.reason)
