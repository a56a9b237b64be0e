"""The worker's end of the line: bounded, whole lines, and a lost agent is said."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.channel import (
    AGENT_SOCKET,
    MAX_LINE,
    WORKER_LAUNCH,
    AgentLink,
    LineBuffer,
    LinkLost,
    to_line,
)
from elastic_core.model.failure import Failure
from elastic_core.model.messages import LeaveGeneration, WorkerFailed, WorkerReady


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[AgentLink, socket.socket]]:
    """A connected link and the agent's end, which has read the hello."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        link = AgentLink.connect({AGENT_SOCKET: str(path), WORKER_LAUNCH: "5"})
        agent, _ = listener.accept()
        assert agent.recv(100) == b"5\n"
        with agent:
            yield link, agent
        link.close()


def test_a_process_without_an_agent_is_told_so() -> None:
    with pytest.raises(LinkLost, match="ELASTIC_AGENT_SOCKET is not set"):
        AgentLink.connect({})


def test_an_agent_that_is_gone_is_named_by_its_socket(tmp_path: Path) -> None:
    with pytest.raises(LinkLost, match=f"socket '{tmp_path}/none' does not answer: .*No such file"):
        AgentLink.connect({AGENT_SOCKET: f"{tmp_path}/none"})


def test_a_message_goes_out_as_one_line(ends: tuple[AgentLink, socket.socket]) -> None:
    link, agent = ends
    link.send(WorkerReady())

    assert agent.recv(100) == b'{"kind":"worker_ready"}\n'


def test_messages_from_several_threads_are_not_mixed(ends: tuple[AgentLink, socket.socket]) -> None:
    link, agent = ends
    failure = Failure(node_id="n.a", generation=1, rank=0, local_rank=0, exit_code=1, message="x" * 9_000)
    message = WorkerFailed(failure=failure)
    threads = [threading.Thread(target=lambda: [link.send(message) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    expected = to_line(message)
    received = bytearray()
    while len(received) < 200 * len(expected):
        received += agent.recv(1 << 16)
    for thread in threads:
        thread.join()

    assert received == expected * 200


def test_a_message_over_the_limit_is_refused(ends: tuple[AgentLink, socket.socket]) -> None:
    failure = Failure(node_id="n.a", generation=1, rank=0, local_rank=0, exit_code=1, message="x" * MAX_LINE)

    with pytest.raises(ValueError, match=f"WorkerFailed of 1048.* bytes is over the limit of {MAX_LINE}"):
        ends[0].send(WorkerFailed(failure=failure))


def test_messages_are_received_one_by_one_and_unknown_ones_skipped(
    ends: tuple[AgentLink, socket.socket],
) -> None:
    link, agent = ends
    agent.sendall(to_line(LeaveGeneration(generation=1)) + b'{"kind": "of the future"}\n')
    agent.sendall(to_line(LeaveGeneration(generation=2)) + b'{"kind": "leave')

    assert [link.receive(0) for _ in range(3)] == [
        LeaveGeneration(generation=1),
        LeaveGeneration(generation=2),
        None,
    ]


def test_an_agents_end_is_told_after_its_last_message(ends: tuple[AgentLink, socket.socket]) -> None:
    link, agent = ends
    agent.sendall(to_line(LeaveGeneration(generation=1)))
    agent.close()

    assert link.receive(0) == LeaveGeneration(generation=1)
    with pytest.raises(LinkLost, match="closed the connection"):
        link.receive()
    with pytest.raises(LinkLost, match="the agent is gone"):
        link.send(WorkerReady())


def test_a_close_wakes_who_waits(ends: tuple[AgentLink, socket.socket]) -> None:
    link, _ = ends
    outcome: list[BaseException] = []

    def wait() -> None:
        try:
            link.receive()
        except LinkLost as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    link.close()
    thread.join(10)

    assert [type(error) for error in outcome] == [LinkLost]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_lines_are_the_same_however_they_arrive(size: int) -> None:
    data = b"one\n\ntwo\nthree and more\nrest"
    buffer = LineBuffer()
    pieces = [data[start : start + size] for start in range(0, len(data), size)]

    assert [line for piece in pieces for line in buffer.feed(piece)] == [
        b"one",
        b"",
        b"two",
        b"three and more",
    ]
    assert buffer.feed(b"\n") == [b"rest"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_line_over_the_limit_is_dropped_and_the_next_is_not(size: int) -> None:
    buffer = LineBuffer(limit=6)
    data = b"12345\n123456\n1234567890\n\n54321\n"
    pieces = [data[start : start + size] for start in range(0, len(data), size)]

    assert [line for piece in pieces for line in buffer.feed(piece)] == [b"12345", b"", b"54321"]
    assert buffer.dropped == 2
