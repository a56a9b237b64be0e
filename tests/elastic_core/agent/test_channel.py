"""The agent's ends of its sockets: no peer can fill its memory or hold it up."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.agent.channel import Peer, WorkerListener
from elastic_core.channel import AGENT_SOCKET, MAX_LINE, WORKER_LAUNCH, AgentLink
from elastic_core.model.messages import LeaveGeneration, WorkerAttached, WorkerReady

ATTACHED = WorkerAttached(local_rank=0, pid=1)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[WorkerListener]:
    listener = WorkerListener(tmp_path / "s")
    yield listener
    listener.close()


def connect(listener: WorkerListener, launch: str = "1") -> AgentLink:
    return AgentLink.connect({AGENT_SOCKET: str(listener.path), WORKER_LAUNCH: launch})


def test_a_worker_is_known_by_the_launch_that_it_names(listener: WorkerListener) -> None:
    with connect(listener, "17") as link:
        link.send(WorkerReady())
        (peer,) = listener.accept()

        assert peer.messages() == [WorkerReady()]
        assert peer.launch == 17


@pytest.mark.parametrize("launch", ["", "-1", "nonsense", "9" * 10, "1.5"])
def test_nonsense_for_a_launch_is_nobodys(listener: WorkerListener, launch: str) -> None:
    with connect(listener, launch) as link:
        link.send(WorkerReady())
        (peer,) = listener.accept()
        peer.messages()

        assert peer.launch == -1


def test_only_attached_and_wanted_workers_are_sent_to(listener: WorkerListener) -> None:
    with connect(listener, "1") as first, connect(listener, "2") as second, connect(listener, "3") as third:
        first.send(ATTACHED)
        second.send(ATTACHED)
        third.send(WorkerReady())
        for peer in listener.accept():
            peer.messages()

        listener.send(LeaveGeneration(generation=4), wanted=lambda launch: launch != 2)

        received = [link.receive(0) for link in (first, second, third)]
        assert received == [LeaveGeneration(generation=4), None, None]


def test_lines_that_are_no_messages_are_dropped(listener: WorkerListener) -> None:
    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(listener.path))
        raw.sendall(b'1\nnot json\n{"kind": "of the future"}\n\n[]\n{"kind": "worker_ready"}\n')
        (peer,) = listener.accept()

        assert peer.messages() == [WorkerReady()]


def test_the_end_of_a_connection_comes_after_its_last_words(listener: WorkerListener) -> None:
    with connect(listener) as link:
        link.send(WorkerReady())
    (peer,) = listener.accept()

    assert peer.messages() == [WorkerReady()]
    assert peer.closed
    listener.drop(peer)
    assert listener.peers == []


def test_a_listener_leaves_no_socket_and_replaces_a_dead_ones(tmp_path: Path) -> None:
    path = tmp_path / "s"
    WorkerListener(path)._socket.close()
    assert path.exists()

    WorkerListener(path).close()

    assert not path.exists()


def test_a_peer_that_does_not_read_is_cut_off_when_too_much_waits() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(ours)
    line = b"x" * (MAX_LINE - 1) + b"\n"
    written = 0
    while not peer.closed:
        peer.write(line)
        written += 1

    assert 8 <= written <= 11
    peer.close()
    theirs.close()


def test_what_a_socket_does_not_take_is_sent_once_it_does() -> None:
    ours, theirs = socket.socketpair()
    peer = Peer(ours)
    line = bytes(range(1, 9)) * 100_000 + b"\n"
    peer.write(line)
    assert peer.has_outgoing

    received = b""
    while len(received) < len(line):
        received += theirs.recv(1 << 16)
        peer.flush()

    assert received == line
    assert not peer.has_outgoing
    peer.close()
    theirs.close()
