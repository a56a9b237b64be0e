"""The agent's driver: one loop that delivers facts to the machine and performs what it commands.

Only this loop calls the machine. Every other thread (workers, store, ring, the
coordinator's term) puts facts into its queue. The loop itself never waits for the
store, so that workers are stopped and signals obeyed also while it is away.
"""

from __future__ import annotations

import contextlib
import os
import queue
import random
import signal
import string
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Final

import structlog

from elastic_core.agent.address import PortReservation, interface_of
from elastic_core.agent.attendance import FlowWatch
from elastic_core.agent.coordination import CoordinatorDriver
from elastic_core.agent.core import AgentCore
from elastic_core.agent.directory import PrivateDirectory
from elastic_core.agent.environment import WorkerSettings, base_environment, worker_environment
from elastic_core.agent.events import (
    AgentCommand,
    AgentEvent,
    AgentStarted,
    DrainRequested,
    Exit,
    ForceRequested,
    ForkServerDied,
    ForkServerReady,
    GenerationPublished,
    KillWorker,
    LeaseEnded,
    NodeStatus,
    NodeUnfit,
    Register,
    Registered,
    ReplaceWorker,
    ReportFailure,
    Say,
    SendToWorkers,
    StartWorkers,
    StopWorkers,
    StoreSilent,
    TimeAdvanced,
    WakeAt,
    WarmForkServer,
    WorkerEnded,
    WorkerSpoke,
    WorkersStopped,
    WritePace,
    WriteProgress,
    WriteResult,
    WriteResumption,
    WriteStatus,
)
from elastic_core.agent.health import leave_record
from elastic_core.agent.kernel_kills import KernelKills
from elastic_core.agent.leadership import Leadership
from elastic_core.agent.metadata import NoticeWatch
from elastic_core.agent.notices import Notice
from elastic_core.agent.outbox import Outbox
from elastic_core.agent.policies import coordinator_policy_of, policy_of
from elastic_core.agent.probe import ProbeServer, RingWatch, Suspicion, is_reached_by
from elastic_core.agent.pulse_watch import PulseWatch
from elastic_core.agent.settings import AgentSettings
from elastic_core.agent.worker_group import (
    ForkServerLost,
    ForkServerWarmed,
    WorkerEvent,
    WorkerExited,
    WorkerGroup,
    WorkerSaid,
    WorkerSpec,
)
from elastic_core.agent.worker_group import WorkersStopped as GroupStopped
from elastic_core.clock import Clock
from elastic_core.errors import StoreError, StoreUnavailable
from elastic_core.exits import ExitCode, exit_code_of
from elastic_core.ids import NO_LEASE, NodeId, Revision, make_node_id
from elastic_core.model.codec import decode, encode
from elastic_core.model.failure import Failure, bound
from elastic_core.model.messages import EnterGeneration, GroupBroken, WorkerFailed
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Store

_LOG = structlog.get_logger()
_FLUSH_S: Final = 2.0
_LOG_LINES: Final = 20
_MAX_LOG: Final = 4_000
_ASKED: Final = 8
_IN_RING: Final = (NodePhase.READY, NodePhase.DRAINING)


@dataclass(frozen=True, slots=True)
class _ThreadFailed:
    """A thread of this process met an error that it does not know: a bug, and nobody does its work now."""

    reason: str


class AgentDriver:
    """One agent, from registration to its exit code. To be made and run on the main thread."""

    def __init__(self, settings: AgentSettings, store: Store, *, address: str, clock: Clock) -> None:
        """Prepare everything but processes.

        Args:
            settings: What to run.
            store: The run's store, which answers.
            address: Where the other nodes reach this one.
            clock: The machine's.
        """
        self._settings = settings
        self._store = store
        self._clock = clock
        self._address = address
        self._keys = RunKeys(settings.run)
        self._inbox: queue.SimpleQueue[AgentEvent | WorkerEvent | _ThreadFailed] = queue.SimpleQueue()
        self._core = AgentCore(policy_of(settings))
        self._node_id = NodeId("")
        self._status = NodeStatus()
        self._wake_at: float | None = None
        self._exit: Exit | None = None
        self._unprinted: list[Failure] = []
        self._signals = 0
        self._private = PrivateDirectory()
        self._directory = self._private.path
        self._workers = self._worker_settings()
        self._group = self._worker_group()
        self._pulses = PulseWatch(
            self._directory,
            processes=self._group.processes,
            tell=self._inbox.put,
            declared=settings.waits.hang,
            clock=clock,
        )
        self._kernel_kills = KernelKills()
        self._port = PortReservation()
        self._probes = ProbeServer(clock)
        self._ring = RingWatch(
            look_up=self._look_up,
            suspected=self._suspect,
            limit=settings.waits.suspect,
            clock=clock,
            asked_at=lambda: self._probes.asked_at,
        )
        self._outbox = Outbox(
            store, self._keys, ttl_s=settings.waits.lease_ttl, tell=self._inbox.put, clock=clock
        )
        self._leadership = Leadership(store, self._keys, make_term=self._make_term)
        source = settings.notice_source
        self._notices = NoticeWatch(source, self._announce) if source else None
        alone = settings.waits.flow
        self._flow = FlowWatch(store, self._keys, limit=alone, clock=clock) if alone else None

    @property
    def node_id(self) -> NodeId:
        """The node's present id."""
        return self._node_id

    @property
    def generation(self) -> int:
        """The newest generation acted on."""
        return self._core.memory.generation

    @property
    def unprinted(self) -> Sequence[Failure]:
        """The failures of own workers whose tracebacks they left to this agent to print."""
        return self._unprinted

    def run(self) -> Exit:
        """Take part in the run until it is over for this node, and return how to end."""
        handlers = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGTERM, signal.SIGINT)
        }
        hook, threading.excepthook = threading.excepthook, self._on_thread_error
        try:
            self._handle(AgentStarted())
            while self._exit is None:
                self._turn()
            return self._exit
        finally:
            self._close()
            threading.excepthook = hook
            for number, handler in handlers.items():
                signal.signal(number, handler)

    # ---- facts -------------------------------------------------------------------------------

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals == 1:
            self._inbox.put(DrainRequested(reason=name))
        else:
            self._inbox.put(ForceRequested(exit_code=exit_code_of(-number), reason=f"second {name}"))

    def _on_thread_error(self, failed: threading.ExceptHookArgs) -> None:
        name = failed.thread.name if failed.thread else "unknown"
        told = (failed.exc_type, failed.exc_value or failed.exc_type(), failed.exc_traceback)
        _LOG.error("a thread failed", thread=name, exc_info=told)
        self._inbox.put(
            _ThreadFailed(f"thread {name!r} failed: {failed.exc_type.__name__}: {failed.exc_value}")
        )

    def _turn(self) -> None:
        """Wait for the next fact, at most until the requested wake-up."""
        with contextlib.suppress(queue.Empty):
            self._take(self._inbox.get(timeout=self._patience()))
        if self._exit is None:
            self._look_at_the_clock()

    def _take(self, fact: AgentEvent | WorkerEvent | _ThreadFailed) -> None:
        if isinstance(fact, _ThreadFailed):
            self._exit = Exit(code=ExitCode.FAILED, reason=f"a bug of the agent: {fact.reason}")
            return
        if isinstance(fact, ForkServerWarmed):
            _LOG.info("fork server is warm", seconds=round(fact.seconds, 3), notice=fact.notice or None)
        event = _agent_event(fact)
        if isinstance(event, WorkerEnded) and event.code == -signal.SIGKILL:
            event = replace(event, why=self._kernel_kills.blame())
        if self._concerns_us(event):
            self._handle(event)

    def _patience(self) -> float:
        due = self._settings.waits.join / 4
        if self._wake_at is not None:
            due = min(due, self._wake_at - self._clock.monotonic())
        return max(0.0, due)

    def _look_at_the_clock(self) -> None:
        now = self._clock.monotonic()
        if self._wake_at is not None and now >= self._wake_at:
            self._wake_at = None
            self._handle(TimeAdvanced())
        silence = now - self._outbox.heard_at
        if silence > self._settings.waits.join:
            self._handle(StoreSilent(seconds=silence))

    def _concerns_us(self, event: AgentEvent) -> bool:
        """Sort out what an earlier incarnation was told, and tell the parts that care."""
        match event:
            case WorkerSpoke(message=WorkerFailed(failure=failure, printed=False)):
                self._unprinted.append(failure)
            case Registered(node_id=node_id) if node_id == self._node_id:
                standing = self._outbox.standing
                if standing is not None:
                    self._leadership.stand(standing)
            case LeaseEnded(node_id=node_id) if node_id == self._node_id:
                self._ring.follow(NodeId(""))
                self._leadership.resign()
            case Registered() | LeaseEnded():
                return False
            case WorkerSpoke(message=GroupBroken()):
                self._ring.hurry()
        return True

    def _handle(self, event: AgentEvent) -> None:
        before = self._core.state
        commands = self._core.handle(event, self._clock.monotonic())
        if self._core.state is not before:
            _LOG.debug("state", before=str(before), now=str(self._core.state))
        for command in commands:
            self._perform(command)

    # ---- commands ----------------------------------------------------------------------------

    def _perform(self, command: AgentCommand) -> None:
        match command:
            case StartWorkers(part=part):
                self._start_workers(part)
            case SendToWorkers(message=message):
                if isinstance(message, EnterGeneration):
                    self._prepare(
                        GenerationPublished(generation=message.generation, assignment=message.assignment)
                    )
                self._group.send(message)
            case StopWorkers(grace=grace):
                self._group.stop(grace)
            case ReplaceWorker(local_rank=local_rank):
                self._group.replace(local_rank, self._environment(local_rank, None))
            case KillWorker(local_rank=local_rank, pid=pid):
                self._group.kill(local_rank, pid)
            case WarmForkServer():
                self._group.warm()
            case WakeAt(at=at):
                self._wake_at = at
            case Say(text=text):
                _LOG.info(text)
            case Exit():
                self._exit = command
            case _:
                self._write(command)

    def _write(self, command: AgentCommand) -> None:
        match command:
            case Register(status=status, renew=renew):
                if renew:
                    self._node_id = make_node_id(self._settings.name, _incarnation())
                record = self._record(status)
                leave_record(self._directory, record)
                self._outbox.register(record, self._is_reached if renew else lambda: True)
            case WriteStatus(status=status):
                self._outbox.write(self._record(status))
            case ReportFailure(failure=failure, status=status):
                self._ring.hurry()
                tail = self._group.log_tail(failure.local_rank, _LOG_LINES)
                failure = replace(
                    failure,
                    log_tail=bound(tail, _MAX_LOG),
                    wall_time=failure.wall_time or self._clock.wall(),
                )
                self._outbox.write(self._record(status), failure)
            case WriteProgress(progress=progress):
                self._outbox.put_progress(progress, self._node_id)
            case WriteResumption(resumption=resumption):
                key = self._keys.resumption(resumption.generation)
                self._outbox.put(key, encode(resumption), self._node_id)
            case WritePace(slow=slow):
                key = self._keys.slow_worker(slow.node_id, slow.local_rank)
                self._outbox.put(key, encode(slow), self._node_id)
            case WriteResult(result=result):
                self._outbox.put(self._keys.result, encode(result), self._node_id)

    def _record(self, status: NodeStatus) -> NodeRecord:
        """Return the node's record; its lease is known to the outbox."""
        if status.phase not in _IN_RING:
            self._ring.follow(NodeId(""))
        return NodeRecord(
            node_id=self._node_id,
            address=self._address,
            probe_port=self._probes.port,
            probe_token=self._probes.token,
            master_port=self._port.port,
            slots=self._settings.slots,
            lease=NO_LEASE,
            phase=status.phase,
            generation=status.generation,
            broken=status.broken,
            failed=status.failed,
            step=status.step,
            notice=status.notice,
        )

    def _start_workers(self, part: GenerationPublished | None) -> None:
        entrypoint = self._settings.entrypoint
        if entrypoint.kind == "script" and not os.access(entrypoint.target, os.R_OK):
            self._inbox.put(
                NodeUnfit(reason=f"script {entrypoint.target!r} cannot be read on this node any more")
            )
            return
        if part is not None:
            self._prepare(part)
        ranks = range(self._settings.slots)
        self._group.start([self._environment(local_rank, part) for local_rank in ranks])

    def _prepare(self, part: GenerationPublished) -> None:
        """Free the port where rank 0 will listen, reserve the next one, and watch the neighbour."""
        assignment = part.assignment
        if assignment is None:
            return
        if assignment.group_rank == 0:
            released, self._port = self._port, PortReservation()
            released.release()
        size = part.generation.group_world_size
        self._ring.follow(assignment.successor, rank=assignment.group_rank, size=size)

    def _environment(self, local_rank: int, part: GenerationPublished | None) -> Mapping[str, str]:
        return worker_environment(self._workers, self._node_id, local_rank, part)

    # ---- what other threads call -------------------------------------------------------------

    def _look_up(self, node_id: NodeId) -> NodeRecord | None:
        try:
            entry = self._store.read(self._keys.node(node_id))
        except StoreUnavailable:
            return None
        return decode(NodeRecord, entry.value) if entry else None

    def _is_reached(self) -> bool:
        """Whether another node answers: one that none of them reaches would break every group it joins."""
        entries = self._store.read_prefix(self._keys.nodes).entries
        records = [decode(NodeRecord, entry.value) for entry in entries]
        others = [record for record in records if record.phase in _IN_RING]
        asked = random.sample(others, min(len(others), _ASKED))
        return is_reached_by(asked, timeout_s=self._settings.waits.probe)

    def _suspect(self, suspicion: Suspicion) -> None:
        _LOG.warning("fencing the neighbour", neighbour=suspicion.node_id, reason=suspicion.reason)
        try:
            self._store.revoke(suspicion.lease)
        except StoreError as error:
            _LOG.warning("the neighbour could not be fenced", reason=str(error))

    def _announce(self, notice: Notice) -> None:
        within = notice.out_within_s()
        leave_by = None if within is None else self._clock.monotonic() + within
        self._inbox.put(DrainRequested(reason=notice.text, notice=notice.text, leave_by=leave_by))

    def _make_term(self, won: Revision) -> CoordinatorDriver:
        return CoordinatorDriver(
            self._store,
            self._keys,
            policy=coordinator_policy_of(self._settings),
            leader=won,
            clock=self._clock,
        )

    # ---- making and ending -------------------------------------------------------------------

    def _worker_settings(self) -> WorkerSettings:
        settings = self._settings
        return WorkerSettings(
            run=settings.run,
            slots=settings.slots,
            run_dir=settings.run_dir,
            job=settings.job,
            attempt=settings.attempt,
            role=settings.role,
            max_restarts=settings.max_restarts,
            interface=interface_of(self._address),
            errors=self._directory,
        )

    def _worker_group(self) -> WorkerGroup:
        settings = self._settings
        spec = WorkerSpec(
            slots=settings.slots,
            api=settings.api,
            entrypoint=settings.entrypoint,
            args=settings.args,
            preload=settings.preload,
            start_method=settings.start_method,
            preflight=settings.preflight,
            log_dir=settings.log_dir,
            environment=base_environment(self._workers, os.environ),
        )
        return WorkerGroup(spec=spec, events=self._inbox.put, socket_dir=self._directory, clock=self._clock)

    def _close(self) -> None:
        """End everything: workers first, so that no lease is given up while one still trains."""
        for watch in (self._notices, self._flow):
            if watch is not None:
                watch.close()
        self._pulses.close()
        self._group.close()
        self._ring.close()
        self._outbox.flush(_FLUSH_S)
        self._leadership.close()
        self._outbox.close(revoke=True)
        self._probes.close()
        self._port.release()
        self._private.remove()


def _agent_event(fact: AgentEvent | WorkerEvent) -> AgentEvent:
    """Return what the machine knows a worker group's event as."""
    match fact:
        case ForkServerWarmed():
            return ForkServerReady()
        case ForkServerLost(reason=reason, exit_code=exit_code):
            return ForkServerDied(reason=reason, exit_code=exit_code)
        case WorkerSaid(local_rank=local_rank, message=message):
            return WorkerSpoke(local_rank=local_rank, message=message)
        case WorkerExited(exit=ended):
            return WorkerEnded(local_rank=ended.local_rank, code=ended.code)
        case GroupStopped():
            return WorkersStopped()
    return fact


def _incarnation() -> str:
    """Return what no earlier agent of this name had."""
    return "".join(random.choices(string.ascii_lowercase + string.digits, k=8))
