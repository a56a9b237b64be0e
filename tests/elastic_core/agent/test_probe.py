from __future__ import annotations

import math
import queue
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic_core.agent.health import is_healthy, leave_record
from elastic_core.agent.probe import (
    Prober,
    ProbeServer,
    RingWatch,
    SilenceMeter,
    Suspicion,
    is_reached_by,
    pack,
)
from elastic_core.clock import SystemClock
from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.node import NodeRecord

B = NodeId("b.1")


def record_of(port: int, token: str) -> NodeRecord:
    return NodeRecord(
        node_id=B, address="127.0.0.1", probe_port=port, probe_token=token, master_port=0, slots=1,
        lease=LeaseId(7),
    )  # fmt: skip


@pytest.fixture
def server() -> Iterator[ProbeServer]:
    server = ProbeServer()
    yield server
    server.close()


@pytest.fixture
def silent() -> Iterator[NodeRecord]:
    """A node that is frozen: its port is there, nobody answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as frozen:
        frozen.bind(("127.0.0.1", 0))
        yield record_of(frozen.getsockname()[1], "token")


class Ring:
    """A ring watch with what it suspected."""

    def __init__(
        self,
        neighbour: NodeRecord,
        limit: float,
        *,
        rank: int = 0,
        size: int = 2,
        asked_at: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self._place = {"rank": rank, "size": size}
        self.suspected: queue.SimpleQueue[Suspicion] = queue.SimpleQueue()
        self.watch = RingWatch(
            look_up=lambda node_id: neighbour if node_id == B else None,
            suspected=self.suspected.put,
            limit=limit,
            clock=SystemClock(),
            asked_at=asked_at,
            interval=0.02,
        )

    def __enter__(self) -> Ring:
        self.watch.follow(B, **self._place)
        return self

    def __exit__(self, *_: object) -> None:
        self.watch.close()


# ---- one question ----------------------------------------------------------------------------


def test_a_node_that_is_asked_with_its_token_answers(server: ProbeServer) -> None:
    heard: queue.SimpleQueue[NodeId] = queue.SimpleQueue()
    prober = Prober(heard.put)
    prober.ask([record_of(server.port, server.token)])
    assert heard.get(timeout=5) == B
    prober.close()


def test_a_stranger_without_the_token_gets_no_answer(server: ProbeServer) -> None:
    heard: queue.SimpleQueue[NodeId] = queue.SimpleQueue()
    prober = Prober(heard.put)
    prober.ask([record_of(server.port, "guess")])
    prober.ask([record_of(server.port, server.token)])
    assert heard.get(timeout=5) == B
    assert heard.empty()
    prober.close()


def test_nonsense_neither_ends_the_server_nor_gets_an_answer(server: ProbeServer) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(0.1)
        for packet in (b"", b"x", b"ETq1", b"\xff" * 400):
            stranger.sendto(packet, ("127.0.0.1", server.port))
        with pytest.raises(TimeoutError):
            stranger.recv(100)
    test_a_node_that_is_asked_with_its_token_answers(server)


def test_an_answer_is_never_longer_than_its_question(server: ProbeServer) -> None:
    question = pack(b"ETq1", b"12345678", server.token)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.settimeout(5)
        stranger.sendto(question, ("127.0.0.1", server.port))
        assert len(stranger.recv(1000)) == len(question)


def test_a_container_is_healthy_as_long_as_its_agent_answers(tmp_path: Path) -> None:
    directory = tmp_path / "elastic-agent-x"
    directory.mkdir()
    assert not is_healthy(tmp_path)
    living = ProbeServer()
    leave_record(directory, record_of(living.port, living.token))
    assert is_healthy(tmp_path)
    living.close()
    assert not is_healthy(tmp_path, patience_s=0.2)


# ---- the ring --------------------------------------------------------------------------------


def test_a_neighbour_that_answers_is_not_suspected(server: ProbeServer) -> None:
    with Ring(record_of(server.port, server.token), limit=0.2) as ring, pytest.raises(queue.Empty):
        ring.suspected.get(timeout=1.0)


def test_a_frozen_neighbour_is_suspected_after_the_limit(silent: NodeRecord) -> None:
    with Ring(silent, limit=0.2) as ring:
        suspicion = ring.suspected.get(timeout=5)
    assert (suspicion.node_id, suspicion.lease) == (B, 7)
    assert suspicion.reason.startswith("silent for ")


def test_a_dead_neighbour_is_suspected_long_before_the_limit(server: ProbeServer) -> None:
    dead = ProbeServer()
    record = record_of(dead.port, dead.token)
    dead.close()
    with Ring(record, limit=60) as ring:
        assert ring.suspected.get(timeout=5).reason == "its agent is dead"


def test_a_neighbour_is_suspected_once(silent: NodeRecord) -> None:
    with Ring(silent, limit=0.1) as ring:
        ring.suspected.get(timeout=5)
        with pytest.raises(queue.Empty):
            ring.suspected.get(timeout=0.5)


def test_a_node_that_nobody_asks_either_is_cut_off_itself_and_accuses_nobody(silent: NodeRecord) -> None:
    with Ring(silent, limit=0.1, size=3, asked_at=lambda: 0.0) as ring, pytest.raises(queue.Empty):
        ring.suspected.get(timeout=0.6)


def test_a_node_that_is_reached_again_gives_its_neighbour_the_whole_time(silent: NodeRecord) -> None:
    clock = SystemClock()
    back_at = clock.monotonic() + 0.8

    def asked_at() -> float:
        return clock.monotonic() if clock.monotonic() > back_at else 0.0

    with Ring(silent, limit=0.5, size=3, asked_at=asked_at) as ring:
        ring.suspected.get(timeout=5)
        assert clock.monotonic() > back_at + 0.2, "the silence before counts for nothing"


def test_a_node_that_its_other_neighbour_asks_accuses_the_silent_one(silent: NodeRecord) -> None:
    clock = SystemClock()
    with Ring(silent, limit=0.1, size=3, asked_at=clock.monotonic) as ring:
        assert ring.suspected.get(timeout=5).node_id == B


def test_a_refusal_proves_that_the_neighbours_machine_is_reached(server: ProbeServer) -> None:
    dead = ProbeServer()
    record = record_of(dead.port, dead.token)
    dead.close()
    with Ring(record, limit=60, size=3, asked_at=lambda: 0.0) as ring:
        assert ring.suspected.get(timeout=5).reason == "its agent is dead"


def test_of_two_nodes_that_do_not_hear_each_other_rank_0_accuses_first(silent: NodeRecord) -> None:
    clock = SystemClock()
    began = clock.monotonic()
    with Ring(silent, limit=0.3, rank=1) as patient, Ring(silent, limit=0.3, rank=0) as first:
        first.suspected.get(timeout=5)
        assert patient.suspected.empty()
        patient.suspected.get(timeout=5)
        assert clock.monotonic() - began > 0.6


def test_a_node_that_nobody_reaches_learns_it_and_one_that_is_alone_does_not_wait(
    server: ProbeServer, silent: NodeRecord
) -> None:
    assert not is_reached_by([silent], timeout_s=0.15)
    assert is_reached_by([silent, record_of(server.port, server.token)], timeout_s=5)
    assert is_reached_by([], timeout_s=5)


# ---- fairness --------------------------------------------------------------------------------


def meter(limit: float = 0.7) -> SilenceMeter:
    return SilenceMeter(limit=limit, interval=0.1, now=0.0)


def test_silence_counts_from_the_last_sign_of_life() -> None:
    silence = meter()
    for tick in range(1, 11):
        silence.sent(tick / 10)
        if tick == 3:
            silence.heard(0.3)
        assert bool(silence.verdict(tick / 10)) == (tick / 10 - 0.3 > 0.7)


def test_a_stall_of_our_own_gives_the_neighbour_its_whole_time_again() -> None:
    silence = meter()
    silence.sent(0.1)
    silence.sent(5.0)
    assert silence.verdict(5.0) == ""
    for tick in range(51, 57):
        silence.sent(tick / 10)
        assert silence.verdict(tick / 10) == ""
    silence.sent(5.75)
    assert silence.verdict(5.75) == "silent for 0.8 s"


def test_a_single_refusal_may_be_chance() -> None:
    silence = meter()
    silence.refused()
    assert silence.verdict(0.1) == ""
    silence.heard(0.15)
    silence.refused()
    assert silence.verdict(0.2) == ""
    silence.refused()
    assert silence.verdict(0.25) == "its agent is dead"
