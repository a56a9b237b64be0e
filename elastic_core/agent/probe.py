"""Signs of life over UDP: who answers probes, who asks, and the ring in which neighbours watch.

A probe carries the asked node's token, so that only its peers get an answer, and
an answer is as long as its question, so that nobody can be flooded by it. A frozen
process answers nothing; a dead one is told by the kernel of a living machine.
"""

from __future__ import annotations

import contextlib
import hmac
import math
import os
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from elastic_core.clock import Clock, SystemClock
from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.node import NodeRecord

_HEADER: Final = struct.Struct("!4s8s")
_ASK: Final = b"ETq1"
_ANSWER: Final = b"ETa1"
_MAX_PACKET: Final = 512
_REFUSALS: Final = 2
_TWO: Final = 2
_HURRY: Final = 10
"""Pings in a row that are sent faster than usual when something broke."""
_FASTER: Final = 5
_ATTEMPTS: Final = 3
_LOOK_UP_INTERVALS: Final = 5
"""Between two looks for the record of a neighbour that has none now."""


def pack(kind: bytes, nonce: bytes, token: str) -> bytes:
    """Return a packet."""
    return _HEADER.pack(kind, nonce) + token.encode()


def unpack(packet: bytes, kind: bytes) -> tuple[bytes, str] | None:
    """Return nonce and token of a packet of this kind, or None if it is something else."""
    if len(packet) < _HEADER.size:
        return None
    found, nonce = _HEADER.unpack_from(packet)
    return (nonce, packet[_HEADER.size :].decode(errors="replace")) if found == kind else None


class ProbeServer:
    """Answers probes that carry this node's token, from a thread of its own.

    Attributes:
        token: What a question must carry.
        asked_at: Monotonic time at which a peer asked last.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self.token = os.urandom(12).hex()
        self.asked_at = self._clock.monotonic()
        self._closing = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._thread = threading.Thread(target=self._run, name="probe-server", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """UDP port that it answers on."""
        return int(self._socket.getsockname()[1])

    def close(self) -> None:
        """End the thread: it answers no more."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread, though it reports an error
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                packet, sender = self._socket.recvfrom(_MAX_PACKET)
            except OSError:
                return
            if self._closing:
                return
            asked = unpack(packet, _ASK)
            if asked is not None and hmac.compare_digest(asked[1].encode(), self.token.encode()):
                self.asked_at = self._clock.monotonic()
                with contextlib.suppress(OSError):
                    self._socket.sendto(pack(_ANSWER, asked[0], self.token), sender)


class Prober:
    """Asks nodes once each; answers are told from a thread of its own."""

    def __init__(self, heard: Callable[[NodeId], None]) -> None:
        """Prepare; `heard` is called with each node that answered, and must only enqueue."""
        self._heard = heard
        self._asked: dict[bytes, NodeRecord] = {}
        self._lock = threading.Lock()
        self._closing = False
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._thread = threading.Thread(target=self._run, name="prober", daemon=True)
        self._thread.start()

    def ask(self, records: Iterable[NodeRecord]) -> None:
        """Send each node a probe."""
        for record in records:
            nonce = os.urandom(8)
            with self._lock:
                self._asked[nonce] = record
            with contextlib.suppress(OSError):  # an unreachable node is a silent one
                packet = pack(_ASK, nonce, record.probe_token)
                self._socket.sendto(packet, (record.address, record.probe_port))

    def forget(self) -> None:
        """Await no more answers: the question is settled."""
        with self._lock:
            self._asked.clear()

    def close(self) -> None:
        """End the thread."""
        self._closing = True
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()

    def _run(self) -> None:
        while True:
            try:
                packet = self._socket.recv(_MAX_PACKET)
            except ConnectionRefusedError:
                continue
            except OSError:
                return
            if self._closing:
                return
            answered = unpack(packet, _ANSWER)
            if answered is None:
                continue
            with self._lock:
                record = self._asked.pop(answered[0], None)
            if record is not None and hmac.compare_digest(answered[1].encode(), record.probe_token.encode()):
                self._heard(record.node_id)


def is_reached_by(records: Sequence[NodeRecord], *, timeout_s: float) -> bool:
    """Return whether one of these nodes answers, or there is none."""
    answered = threading.Event()
    prober = Prober(lambda _: answered.set())
    try:
        for _ in range(_ATTEMPTS):
            prober.ask(records)
            if not records or answered.wait(timeout_s / _ATTEMPTS):
                return True
        return False
    finally:
        prober.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspicion:
    """A neighbour gives no sign of life: it should be fenced."""

    node_id: NodeId
    lease: LeaseId
    reason: str


class SilenceMeter:
    """Judges a neighbour by what was sent and heard; pure, so that its fairness can be tested.

    Silence counts only while this process itself runs on time: after a stall of our own the
    neighbour gets its whole time again, for its answers may lie unread here.

    Attributes:
        was_heard: Whether an answer ever came.
    """

    def __init__(self, *, limit: float, interval: float, now: float) -> None:
        """Start a watch now: the neighbour has just been heard, as it were."""
        self._limit = limit
        self._interval = interval
        self._heard_at = now
        self._looked_at = now
        self._unanswered = 0
        self._refused = 0
        self.was_heard = False

    def sent(self, now: float) -> None:
        """A ping was sent."""
        if now - self._looked_at > max(3 * self._interval, self._limit / 2):
            self.pardon(now)
        self._looked_at = now
        self._unanswered += 1

    def heard(self, now: float) -> None:
        """An answer came."""
        self._heard_at, self._unanswered, self._refused = now, 0, 0
        self.was_heard = True

    def silence(self, now: float) -> float:
        """Return for how long nothing came, while this process ran on time."""
        return now - self._heard_at

    def pardon(self, now: float) -> None:
        """Give the neighbour its whole time again: its answers could not have come."""
        self._heard_at, self._unanswered = now, 0

    @property
    def is_refused(self) -> bool:
        """Whether the last that came was a refusal."""
        return self._refused > 0

    def refused(self) -> None:
        """The neighbour's machine said that nobody listens there."""
        self._refused += 1

    def verdict(self, now: float) -> str:
        """Return why the neighbour should be fenced, or "" while it should not."""
        if self._refused >= _REFUSALS:
            return "its agent is dead"
        silence = self.silence(now)
        if silence > self._limit and self._unanswered >= max(3, self._limit / self._interval / 2):
            return f"silent for {silence:.1f} s"
        return ""


def _where(neighbour: NodeRecord, meter: SilenceMeter) -> str:
    """Say where one that never answered was asked: it may be another place than its own."""
    if meter.was_heard or meter.is_refused:
        return ""
    place = f"{neighbour.address}:{neighbour.probe_port} (UDP)"
    return f", and it never answered at {place}: see its --advertise, and what a firewall lets in"


class RingWatch:
    """Pings one neighbour several times a second from a thread of its own, and tells when it is silent.

    Silence has two ends. A node that its own other neighbour does not ask either is the one that is
    cut off: it accuses nobody, and the leases tell who is dead. Between two nodes there is no third to
    ask: rank 0 accuses first, and the other only when it was itself left alone for as long again.
    """

    def __init__(
        self,
        *,
        look_up: Callable[[NodeId], NodeRecord | None],
        suspected: Callable[[Suspicion], None],
        limit: float,
        clock: Clock,
        asked_at: Callable[[], float] = lambda: math.inf,
        interval: float = 0.1,
    ) -> None:
        """Prepare.

        Args:
            look_up: Returns a node's record, None if there is none (now). Called on the ring's thread.
            suspected: Called once, on the ring's thread, for a neighbour silent for longer than `limit`.
            limit: Seconds of silence.
            clock: For intervals.
            asked_at: Returns when a peer asked this node last.
            interval: Seconds between pings.
        """
        self._look_up = look_up
        self._suspected = suspected
        self._limit = limit
        self._interval = interval
        self._clock = clock
        self._asked_at = asked_at
        self._changed = threading.Condition()
        self._followed = NodeId("")
        self._place = (0, _TWO)
        self._hurried = 0
        self._woken = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ring-watch", daemon=True)
        self._thread.start()

    def follow(self, node_id: NodeId, *, rank: int = 0, size: int = 2) -> None:
        """Watch this neighbour from now on, or none if "", as a member of this rank of so many."""
        with self._changed:
            self._followed = node_id
            self._place = (rank, size)
            self._changed.notify_all()

    def hurry(self) -> None:
        """Ask at once and often: a collective broke, so that someone may be dead."""
        with self._changed:
            self._hurried, self._woken = _HURRY, True
            self._changed.notify_all()

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._followed)
                node_id = self._followed
                if self._closing:
                    return
            record = self._look_up(node_id)
            if record is not None:
                self._watch(record)
            else:
                with self._changed:
                    self._changed.wait(_LOOK_UP_INTERVALS * self._interval)

    def _watch(self, neighbour: NodeRecord) -> None:
        began = self._clock.monotonic()
        meter = SilenceMeter(limit=self._limit, interval=self._interval, now=began)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as pinger:
            pinger.setblocking(False)
            pinger.connect((neighbour.address, neighbour.probe_port))
            while self._is_followed(neighbour.node_id):
                self._ping(pinger, neighbour, meter)
                reason = meter.verdict(self._clock.monotonic())
                if reason and self._is_deaf(meter, began):
                    meter.pardon(self._clock.monotonic())
                elif reason and self._may_accuse(meter):
                    self._drop(neighbour.node_id)
                    why = f"{reason}{_where(neighbour, meter)}"
                    self._suspected(Suspicion(node_id=neighbour.node_id, lease=neighbour.lease, reason=why))

    def _is_deaf(self, meter: SilenceMeter, began: float) -> bool:
        """Whether a third node does not reach this one either: then the silence is our own."""
        with self._changed:
            _, size = self._place
        asked_at = max(began, self._asked_at())
        return size > _TWO and not meter.is_refused and self._clock.monotonic() - asked_at > self._limit / 2

    def _may_accuse(self, meter: SilenceMeter) -> bool:
        """Whether it is this node's turn."""
        with self._changed:
            rank, size = self._place
        first = rank == 0 or size > _TWO or meter.is_refused
        return first or meter.silence(self._clock.monotonic()) > 2 * self._limit

    def _is_followed(self, node_id: NodeId) -> bool:
        with self._changed:
            return not self._closing and self._followed == node_id

    def _drop(self, node_id: NodeId) -> None:
        with self._changed:
            if self._followed == node_id:
                self._followed = NodeId("")

    def _ping(self, pinger: socket.socket, neighbour: NodeRecord, meter: SilenceMeter) -> None:
        """Ask once, and wait for the answer; after it, until the next time or a hurry."""
        with contextlib.suppress(OSError):  # refused is told by the next receive, too; else it is silent
            pinger.send(pack(_ASK, os.urandom(8), neighbour.probe_token))
        meter.sent(self._clock.monotonic())
        end = self._clock.monotonic() + self._pause()
        answered = False
        while not answered and (left := end - self._clock.monotonic()) > 0:
            if not select.select([pinger], [], [], left)[0]:
                return
            answered = self._listen(pinger, neighbour, meter)
            if meter.is_refused:
                end = min(end, self._clock.monotonic() + self._interval / _FASTER)
        with self._changed:
            left = end - self._clock.monotonic()
            self._changed.wait_for(lambda: self._closing or self._woken, max(0.0, left))
            self._woken = False

    def _pause(self) -> float:
        with self._changed:
            if self._hurried == 0:
                return self._interval
            self._hurried -= 1
            return self._interval / _FASTER

    def _listen(self, pinger: socket.socket, neighbour: NodeRecord, meter: SilenceMeter) -> bool:
        """Take in what came; return whether it was a sign of life."""
        try:
            packet = pinger.recv(_MAX_PACKET)
        except ConnectionRefusedError:
            meter.refused()
            return False
        except OSError:
            return False
        answered = unpack(packet, _ANSWER)
        if answered is None or not hmac.compare_digest(answered[1].encode(), neighbour.probe_token.encode()):
            return False
        meter.heard(self._clock.monotonic())
        return True
