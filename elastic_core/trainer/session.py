"""A worker's life between its agent's orders: which generation next, when to leave, when to stop.

A thread listens to the agent, for the one that trains may be deep in a collective. A
planned change of the members becomes a wish, which all ranks learn of in the same
step and follow after it. When a member was lost the collective may never return:
then the group is aborted. SIGTERM means the same as the agent's `StopTraining`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from elastic_core.channel import AgentLink, LinkLost
from elastic_core.clock import Clock
from elastic_core.model.membership import Cause
from elastic_core.model.messages import (
    AgentMessage,
    EnterGeneration,
    GenerationLeft,
    LeaveGeneration,
    PaceChanged,
    ProgressMade,
    StepsResumed,
    StopTraining,
    TrainingFinished,
    WorkerAttached,
    WorkerReady,
)
from elastic_core.model.messages import GroupBroken as GroupBrokenMessage
from elastic_core.model.progress import Progress, Resumption, RunResult, SlowWorker
from elastic_core.pulse import Pulse
from elastic_core.trainer.group import Backend, Group, GroupBroken, Seat, Wishes

PLANNED: Final = frozenset({Cause.START, Cause.JOIN, Cause.DRAIN, Cause.RESCALE})
"""Causes under which all members of the generation before live and can finish their step."""

PROGRESS_S: Final = 0.1
"""Between two words of rank 0, which people follow."""
FOLLOWER_PROGRESS_S: Final = 1.0
"""Between two words of another rank: its agent only has to know how far it was when it fails."""
_ABORT_AGAIN_S: Final = 0.05
"""A group that is just forming may open one more connection after it was aborted."""


@dataclass(frozen=True, slots=True)
class Order:
    """A generation to enter.

    Attributes:
        received_at: Wall-clock time at which the agent's word came.
    """

    message: EnterGeneration
    received_at: float

    @property
    def number(self) -> int:
        """The generation's number."""
        return self.message.generation.number


def planned_until(known: int, order: EnterGeneration | LeaveGeneration) -> int:
    """Return the generation up to which every change was heard of and planned.

    A generation that was never heard of may have been a loss.
    """
    cause = order.cause if isinstance(order, LeaveGeneration) else order.generation.cause
    return known + 1 if _number(order) == known + 1 and cause in PLANNED else known


class Session:
    """The link to the agent and what it ordered. Its methods belong to the thread that trains."""

    def __init__(self, link: AgentLink, *, local_rank: int, clock: Clock, pulse: Pulse | None = None) -> None:
        self.pulse = pulse or Pulse()
        self._link = link
        self._local_rank = local_rank
        self._clock = clock
        self._changed = threading.Condition()
        self._order: Order | None = None
        self._release: LeaveGeneration | None = None
        self._stop: StopTraining | None = None
        self._lost: LinkLost | None = None
        self._entered = 0
        self._planned_until = 0
        self._group: Group | None = None
        self._confirmed = 0
        self._progress_at = float("-inf")
        self._wake, self._woken = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._closing = False
        self._thread = threading.Thread(target=self._listen, name="session", daemon=True)

    @classmethod
    def connect(cls, environment: Mapping[str, str], *, clock: Clock) -> Self:
        """Connect to the agent that the environment names; to be called by the main thread.

        Raises:
            LinkLost: There is no agent.
        """
        link = AgentLink.connect(environment)
        session = cls(
            link, local_rank=int(environment.get("LOCAL_RANK", "0")), clock=clock, pulse=Pulse.of(environment)
        )
        session.start()
        return session

    def start(self) -> None:
        """Say that this worker is here, and listen to the agent and to SIGTERM."""
        self._link.send(WorkerAttached(local_rank=self._local_rank, pid=os.getpid()))
        if threading.current_thread() is threading.main_thread():
            # The handler would wait until a collective returns; the byte in the pipe does not.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._woken, warn_on_full_buffer=False)
        self._thread.start()

    def close(self) -> None:
        """End the connection and the thread."""
        if threading.current_thread() is threading.main_thread():
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._closing = True
        os.write(self._woken, b"\0")
        self._thread.join()
        self._link.close()
        os.close(self._wake)
        os.close(self._woken)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- orders ------------------------------------------------------------------------------

    @property
    def stop(self) -> StopTraining | None:
        """The order to end, if it was given."""
        return self._stop

    def ready(self) -> None:
        """Say that set-up is done: the worker can enter a generation at once."""
        self._link.send(WorkerReady())

    def next_order(self, step: int) -> Order | None:
        """Wait for a generation newer than the last one entered; None: the training is to stop.

        A release is confirmed to the agent: this worker is out of the group, whichever way it went.

        Args:
            step: Finished steps, for that confirmation.

        Raises:
            LinkLost: The agent is gone.
        """
        while True:
            with self._changed:
                self._changed.wait_for(self._has_news)
                if self._lost is not None:
                    raise self._lost
                if self._stop is not None:
                    return None
                if (order := self._due_order()) is not None:
                    self._entered = self._planned_until = order.number
                    return order
                self._confirmed = self._newest()
            self._link.send(GenerationLeft(generation=self._entered, step=step, saved=False))

    def _has_news(self) -> bool:
        if self._lost is not None or self._stop is not None or self._due_order() is not None:
            return True
        return self._release is not None and self._release.generation > self._confirmed

    def _due_order(self) -> Order | None:
        is_due = self._order is not None and self._order.number > self._entered and self._release is None
        return self._order if is_due else None

    def enter(self, order: Order, *, backend: Backend, timeout_s: float) -> Group:
        """Form the group of a generation; an order that overtakes it breaks that off.

        Raises:
            GroupBroken: It was not formed.
        """
        generation, assignment = order.message.generation, order.message.assignment
        seat = Seat(
            generation=order.number,
            rank=assignment.first_rank + self._local_rank,
            world_size=generation.world_size,
            host=generation.master_address,
            port=generation.master_port,
        )
        group = Group(seat, backend=backend, timeout_s=timeout_s, pulse=self.pulse)
        with self._changed:
            self._group = group
            self._press()
        try:
            group.form()
        except GroupBroken:
            self.leave(group)
            raise
        with self._changed:
            self._press()
        return group

    def leave(self, group: Group) -> None:
        """Destroy a group: nothing is done to it by an order any more."""
        with self._changed:
            self._group = None
        group.destroy()

    def _press(self) -> None:
        """Have the group follow what was ordered, if anything was that concerns it."""
        group = self._group
        if group is None:
            return
        newest = self._newest()
        is_newer = newest > group.seat.generation
        if self._lost is not None:
            group.abort("the agent is gone")
        elif self._stop is not None and not group.is_formed:
            group.abort(f"stop: {self._stop.reason}")
        elif is_newer and not (group.is_formed and newest <= self._planned_until):
            group.abort(f"generation {newest} is known")
        elif is_newer or self._stop is not None:
            stop = self._stop
            group.want(Wishes(is_newer, stop is not None, stop is not None and stop.save))

    def _newest(self) -> int:
        """Return the number of the newest generation that the agent told of."""
        if self._release is not None:
            return self._release.generation
        return self._order.number if self._order is not None else 0

    # ---- reports -----------------------------------------------------------------------------

    def report_broken(self, generation: int, step: int, error: str) -> None:
        """Say that a generation's collectives failed, unless a newer one is known anyway."""
        if self._newest() <= generation:
            self._link.send(GroupBrokenMessage(generation=generation, step=step, error=error[:500]))

    def report_stopped(self, step: int, *, saved: bool) -> None:
        """Say that this worker ends on request, and whether its last step is durable."""
        self._link.send(GenerationLeft(generation=self._entered, step=step, saved=saved))

    def report_progress(self, progress: Progress, *, every_s: float = PROGRESS_S) -> None:
        """Say how far training is, unless that was said less than `every_s` ago; 0 always says it."""
        now = self._clock.monotonic()
        if now - self._progress_at >= every_s:
            self._progress_at = now
            self._link.send(ProgressMade(progress=progress))

    def report_resumption(self, resumption: Resumption) -> None:
        """Say how a generation came to its first step."""
        self._link.send(StepsResumed(resumption=resumption))

    def report_pace(self, slow: SlowWorker) -> None:
        """Say that this worker is slower than those of other nodes, or is so no more."""
        self._link.send(PaceChanged(slow=slow))

    def report_finished(self, result: RunResult) -> None:
        """Say that the job is complete."""
        self._link.send(TrainingFinished(result=result))

    # ---- the listening thread ------------------------------------------------------------------

    def _listen(self) -> None:
        try:
            while not self._closing:
                self._hear()
        except LinkLost as error:
            self._lose(error)
        except Exception as error:  # this thread must not end unheard
            self._lose(LinkLost(f"listening to the agent failed: {error!r}"))

    def _hear(self) -> None:
        while (message := self._link.receive(0)) is not None:
            self._take(message)
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._link.fileno(), select.POLLIN)
        poll.poll(_ABORT_AGAIN_S * 1000 if self._is_forming() else None)
        with contextlib.suppress(BlockingIOError):
            if signal.SIGTERM in os.read(self._wake, 1 << 12):
                self._take(StopTraining(save=True, reason="SIGTERM"))
        with self._changed:
            self._press()

    def _is_forming(self) -> bool:
        with self._changed:
            return self._group is not None and not self._group.is_formed

    def _take(self, message: AgentMessage) -> None:
        with self._changed:
            if isinstance(message, StopTraining):
                self._stop = self._stop or message
            elif _number(message) > self._newest():
                self._planned_until = planned_until(self._planned_until, message)
                if isinstance(message, LeaveGeneration):
                    self._release = message
                else:
                    self._order, self._release = Order(message, self._clock.wall()), None
            self._press()
            self._changed.notify_all()

    def _lose(self, error: LinkLost) -> None:
        with self._changed:
            if not self._closing:
                self._lost = error
                self._press()
                self._changed.notify_all()


def _number(order: EnterGeneration | LeaveGeneration) -> int:
    return order.generation if isinstance(order, LeaveGeneration) else order.generation.number
