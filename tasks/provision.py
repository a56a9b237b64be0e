"""The cluster of one run: its etcd and its nodes, found where they exist and started where they do not."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final

from elastic_core.cluster.provider import Instance, InstanceState, LaunchResult
from elastic_core.errors import ProviderUnavailable
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Outcome
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Store
from tasks.agents import Attempt, etcd_of, provider_of
from tasks.etcd import NoEtcd, RunningEtcd, connected, discard_data
from tasks.runs import RunDirectory
from tasks.watch import observe

ALIVE: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING})


class Cluster:
    """Everything of a run that runs: adopts before it creates; every method may be repeated.

    Args:
        pause: Sleeps where starting waits for a machine; may raise to break the start off.
    """

    def __init__(
        self, job: JobSpec, directory: RunDirectory, *, pause: Callable[[float], None] = time.sleep
    ) -> None:
        self.keys = RunKeys(directory.run)
        self._job = job
        self._directory = directory
        self._provider = provider_of(job.pool, directory.path.parent, drives=True)
        self._etcd = etcd_of(job, directory, pause=pause)
        self._attempt: Attempt | None = None

    @property
    def attempt(self) -> Attempt:
        """The attempt that was found or started.

        Raises:
            RuntimeError: Neither happened yet.
        """
        if self._attempt is None:
            raise RuntimeError("find_or_start comes first")
        return self._attempt

    def find_or_start(self) -> str:
        """Adopt the running attempt, or begin a new one without nodes; return what was decided and why."""
        adopted = self._adopt()
        if adopted is not None:
            self._attempt = adopted
            count = len(self.alive())
            return f"adopted attempt {adopted.number} of run {self._directory.run}: {count} nodes run"
        self._end_in_former_pool()
        leftover = self.alive()
        self._provider.teardown(self._directory.run)
        number = self._directory.begin_attempt(self._job, now=time.time())
        self._attempt = self._describe(self._etcd.start(number))
        ended = f" after ending {len(leftover)} nodes of an earlier one" if leftover else ""
        return f"attempt {number} of run {self._directory.run} begins{ended}"

    def launch(self, token: str, count: int) -> LaunchResult:
        """Launch nodes; the same token never launches twice."""
        self._directory.mark("asked_at", now=time.time())
        result = self._provider.launch(self.attempt.launch_request(token, count))
        if len(self.alive()) >= self._job.nodes.min:
            self._directory.mark("granted_at", now=time.time())
        return result

    def terminate(self, names: Collection[str]) -> None:
        """End nodes."""
        self._provider.terminate(self._directory.run, names)

    def instances(self) -> Sequence[Instance]:
        """Return all nodes of the run, ended ones too."""
        return self._provider.list_nodes(self._directory.run)

    def alive(self) -> list[Instance]:
        """Return the nodes that run or are about to."""
        return [instance for instance in self.instances() if instance.state in ALIVE]

    def tend(self) -> str:
        """Start a dead etcd again, with its data; return what was done, "" if nothing."""
        if self._etcd.is_running():
            return ""
        self._etcd.ensure()
        return "etcd had died and was started again with its data; training was not touched"

    @contextmanager
    def connected(self) -> Iterator[Store]:
        """Connect to the run's store."""
        record = self._etcd.record()
        if record is None:
            raise NoEtcd("find_or_start comes first")
        with connected(record.endpoint, self._etcd.source) as store:
            yield store

    def note_end(self) -> None:
        """Note that the run is over: from now on its nodes and etcd are only ended."""
        self._directory.mark("teardown_at", now=time.time())

    def tear_down(self) -> None:
        """End all nodes, then etcd."""
        self.note_end()
        self._provider.teardown(self._directory.run)
        self._etcd.stop()

    def forget_store(self) -> None:
        """Remove the data of the ended etcd: the report holds what is worth keeping."""
        discard_data(self._directory)

    def _end_in_former_pool(self) -> None:
        """End what an earlier attempt left in a pool of another kind, if that pool still answers."""
        before = self._directory.job()
        if before.pool.kind != self._job.pool.kind:
            with suppress(ProviderUnavailable):
                Cluster(before, self._directory).tear_down()

    def _adopt(self) -> Attempt | None:
        """Return the newest attempt if it goes on, or succeeded while nobody watched."""
        number, record = self._directory.attempt(), self._etcd.record()
        if record is None or record.attempt != number:
            return None
        nodes_run = bool(self.alive())
        if not nodes_run and self._directory.outcome() is not None:
            return None
        record = self._etcd.ensure()
        with connected(record.endpoint, self._etcd.source) as store:
            closed = observe(store, self.keys).closed
        goes_on = nodes_run if closed is None else closed.outcome is Outcome.SUCCEEDED
        return self._describe(record) if goes_on else None

    def _describe(self, etcd: RunningEtcd) -> Attempt:
        return Attempt(
            job=self._job,
            directory=self._directory,
            number=etcd.attempt,
            endpoint=etcd.node_endpoint,
            etcd=self._etcd.source,
        )
