from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from elastic_core.channel import AgentLink, LinkLost, to_line
from elastic_core.ids import NodeId
from elastic_core.model.membership import Assignment, Cause, Generation
from elastic_core.model.messages import (
    AgentMessage,
    EnterGeneration,
    GenerationLeft,
    LeaveGeneration,
    ProgressMade,
    StopTraining,
    WorkerAttached,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
)
from elastic_core.model.messages import GroupBroken as GroupBrokenMessage
from elastic_core.model.progress import Progress
from elastic_core.testing.clock import ManualClock
from elastic_core.testing.sessions import free_port
from elastic_core.trainer.group import Group, GroupBroken, Wishes
from elastic_core.trainer.session import FOLLOWER_PROGRESS_S, Session, planned_until


class Agent:
    """The other end of a session's line."""

    def __init__(self) -> None:
        self.connection, end = socket.socketpair()
        self.connection.settimeout(10)
        self._lines = self.connection.makefile("rb")
        self.clock = ManualClock()
        self.session = Session(AgentLink(end), local_rank=0, clock=self.clock)
        self.session.start()
        assert self.hear() == WorkerAttached(local_rank=0, pid=os.getpid())

    def hear(self) -> WorkerMessage:
        return decode_worker_message(self._lines.readline())

    def say(self, message: AgentMessage) -> None:
        self.connection.sendall(to_line(message))

    def enter(self, number: int, cause: Cause = Cause.JOIN, *, world_size: int = 1) -> None:
        generation = Generation(
            number=number,
            cause=cause,
            restart_count=0,
            world_size=world_size,
            group_world_size=world_size,
            master_address="127.0.0.1",
            master_port=free_port(),
        )
        assignment = Assignment(number=number, node_id=NodeId("a"), group_rank=0, first_rank=0, slots=1)
        self.say(EnterGeneration(generation=generation, assignment=assignment))

    def start_generation(self, number: int) -> Group:
        self.enter(number, Cause.START)
        order = self.session.next_order(0)
        assert order is not None
        assert order.number == number
        return self.session.enter(order, backend="gloo", timeout_s=10)

    def close(self) -> None:
        self.session.close()
        self._lines.close()
        self.connection.close()


@pytest.fixture
def agent() -> Iterator[Agent]:
    agent = Agent()
    yield agent
    agent.close()


def step_until(group: Group, wishes: Wishes) -> None:
    """Do steps until all ranks agreed on something; the session hears in a thread of its own."""
    deadline = time.monotonic() + 10
    while not group.agreed:
        group.reduce(torch.zeros(1))
        assert time.monotonic() < deadline
    assert group.agreed == wishes


# ---- orders ----------------------------------------------------------------------------------


def test_it_says_when_it_is_ready(agent: Agent) -> None:
    agent.session.ready()
    assert agent.hear() == WorkerReady()


def test_only_the_newest_order_counts(agent: Agent) -> None:
    for number in (1, 3, 2):
        agent.enter(number)
    agent.say(StopTraining(save=False, reason="end"))
    while agent.session.stop is None:
        pass
    agent.session._stop = None
    order = agent.session.next_order(0)
    assert order is not None
    assert order.number == 3


def test_a_release_that_overtakes_an_order_is_confirmed_and_the_order_not_entered(agent: Agent) -> None:
    agent.enter(5)
    agent.say(LeaveGeneration(generation=6))
    waiting = threading.Thread(target=agent.session.next_order, args=(7,))
    while agent.session._newest() < 6:
        pass
    waiting.start()
    assert agent.hear() == GenerationLeft(generation=0, step=7, saved=False)
    agent.say(StopTraining(save=False, reason="end"))
    waiting.join(10)
    assert not waiting.is_alive()


def test_a_released_worker_enters_a_later_generation(agent: Agent) -> None:
    agent.session.leave(agent.start_generation(1))
    agent.say(LeaveGeneration(generation=2))
    agent.enter(3)
    while agent.session._newest() < 3:
        pass
    order = agent.session.next_order(0)
    assert order is not None
    assert order.number == 3


def test_a_stop_ends_the_wait(agent: Agent) -> None:
    agent.say(StopTraining(save=True, reason="drained"))
    assert agent.session.next_order(0) is None
    assert agent.session.stop == StopTraining(save=True, reason="drained")


def test_sigterm_means_stop_and_save(agent: Agent) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert agent.session.next_order(0) is None
    assert agent.session.stop == StopTraining(save=True, reason="SIGTERM")


def test_the_end_of_the_agent_ends_the_wait(agent: Agent) -> None:
    agent.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(LinkLost):
        agent.session.next_order(0)


# ---- what a group is made to do ----------------------------------------------------------------


def test_a_planned_change_is_followed_at_the_boundary(agent: Agent) -> None:
    group = agent.start_generation(1)
    agent.enter(2, Cause.JOIN)
    step_until(group, Wishes(leave=True))
    agent.session.leave(group)


def test_several_planned_changes_in_a_row_are_followed_at_the_boundary(agent: Agent) -> None:
    group = agent.start_generation(1)
    agent.enter(2, Cause.JOIN)
    agent.enter(3, Cause.DRAIN)
    while agent.session._newest() < 3:
        pass
    step_until(group, Wishes(leave=True))
    agent.session.leave(group)


@pytest.mark.parametrize(("number", "cause"), [(2, Cause.LOSS), (2, Cause.FAILURE), (3, Cause.JOIN)])
def test_a_group_that_lost_a_member_is_given_up_at_once(agent: Agent, number: int, cause: Cause) -> None:
    """Also if a generation in between was never heard of: it may have been a loss."""
    group = agent.start_generation(1)
    agent.enter(number, cause)
    with pytest.raises(GroupBroken, match=f"generation {number} is known"):
        step_until(group, Wishes())
    agent.session.leave(group)


def test_a_release_after_a_loss_gives_the_group_up(agent: Agent) -> None:
    group = agent.start_generation(1)
    agent.say(LeaveGeneration(generation=2, cause=Cause.LOSS))
    with pytest.raises(GroupBroken, match="generation 2 is known"):
        step_until(group, Wishes())
    agent.session.leave(group)


def test_a_stop_is_followed_at_the_boundary(agent: Agent) -> None:
    group = agent.start_generation(1)
    agent.say(StopTraining(save=True, reason="preempted"))
    step_until(group, Wishes(stop=True, save=True))
    agent.session.leave(group)


def test_the_end_of_the_agent_gives_the_group_up(agent: Agent) -> None:
    group = agent.start_generation(1)
    agent.connection.shutdown(socket.SHUT_RDWR)
    with pytest.raises(GroupBroken, match="the agent is gone"):
        step_until(group, Wishes())
    agent.session.leave(group)


def test_a_group_that_is_being_formed_is_left_for_a_newer_generation(agent: Agent) -> None:
    agent.enter(1, Cause.START, world_size=2)
    order = agent.session.next_order(0)
    assert order is not None
    timer = threading.Timer(0.1, agent.enter, [2])
    timer.start()
    with pytest.raises(GroupBroken, match="generation 1 was not formed: generation 2 is known"):
        agent.session.enter(order, backend="gloo", timeout_s=10)
    timer.join()
    following = agent.session.next_order(0)
    assert following is not None
    assert following.number == 2
    agent.session.leave(agent.session.enter(following, backend="gloo", timeout_s=10))


def test_planned_changes_are_counted_without_a_gap() -> None:
    leave = LeaveGeneration(generation=5, cause=Cause.DRAIN)
    assert planned_until(4, leave) == 5
    assert planned_until(3, leave) == 3
    assert planned_until(4, LeaveGeneration(generation=5, cause=Cause.LOSS)) == 4


# ---- reports ---------------------------------------------------------------------------------


def test_a_broken_group_is_reported_unless_a_newer_generation_is_known(agent: Agent) -> None:
    agent.session.report_broken(1, 7, "reset by peer")
    assert agent.hear() == GroupBrokenMessage(generation=1, step=7, error="reset by peer")
    agent.enter(2)
    while agent.session._newest() < 2:
        pass
    agent.session.report_broken(1, 7, "reset by peer")
    agent.session.ready()
    assert agent.hear() == WorkerReady()


def test_progress_is_told_ten_times_a_second_at_most(agent: Agent) -> None:
    for step in range(25):
        agent.clock.advance(0.03)
        agent.session.report_progress(Progress(generation=1, epoch=0, step=step, samples=0))
    agent.session.report_progress(Progress(generation=1, epoch=0, step=99, samples=0), every_s=0)
    agent.session.ready()
    steps = []
    while isinstance(message := agent.hear(), ProgressMade):
        steps.append(message.progress.step)
    assert steps == [0, 4, 8, 12, 16, 20, 24, 99]


def test_another_rank_tells_its_progress_once_a_second(agent: Agent) -> None:
    for step in range(5):
        progress = Progress(generation=1, epoch=0, step=step, samples=0)
        agent.session.report_progress(progress, every_s=FOLLOWER_PROGRESS_S)
        agent.clock.advance(0.6)
    agent.session.ready()
    steps = []
    while isinstance(message := agent.hear(), ProgressMade):
        steps.append(message.progress.step)
    assert steps == [0, 2, 4]
