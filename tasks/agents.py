"""Agents of a run: their command line, and where their nodes come from."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from elastic_core.cluster.provider import LaunchRequest, NodeProvider
from elastic_core.model.job import (
    AwsPool,
    ClassyTraining,
    DockerPool,
    EtcdSource,
    JobSpec,
    LocalPool,
    NodeBounds,
    ScriptTraining,
)
from tasks.etcd import OWN, EtcdProcess, EtcdService
from tasks.etcd_external import ExternalEtcd, agent_flags
from tasks.runs import RunDirectory

if TYPE_CHECKING:
    from tasks.providers.aws.inventory import Inventory

GRACE_S: Final = 1.5
"""Between SIGTERM and SIGKILL of a node: nodes are only ended once their run is over or they left it."""


_ENTRY: Final = {"script": (), "module": ("-m",), "program": ("--no-python",)}
"""The agent's flag for what a job's script is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch of a run: all that its nodes are told.

    Attributes:
        number: Counts the launches of the run; first part of the fence token.
        endpoint: The store's `host:port`, as nodes reach it.
        etcd: What nodes need to get in there.
    """

    job: JobSpec
    directory: RunDirectory
    number: int
    endpoint: str
    etcd: EtcdSource = OWN

    def launch_request(self, token: str, count: int) -> LaunchRequest:
        """Return what launches `count` nodes; the same token never launches twice."""
        return LaunchRequest(
            run=self.directory.run,
            token=token,
            count=count,
            command=(*self._rendezvous(), *_program(self.job.training)),
            environment={"ELASTIC_ATTEMPT": str(self.number)},
        )

    def _rendezvous(self) -> tuple[str, ...]:
        job, waits = self.job, self.job.timeouts
        directory = self.directory.path.absolute()
        return (
            f"--nnodes={job.nodes.min}:{job.nodes.max}",
            *_sizes(job.nodes),
            f"--nproc-per-node={job.workers_per_node}",
            "--rdzv-backend=etcd3",
            f"--rdzv-endpoint={self.endpoint}",
            *agent_flags(self.etcd),
            f"--rdzv-id={self.directory.run}",
            f"--rdzv-conf=lease_ttl={waits.lease_ttl},last_call_timeout={waits.last_call},"
            f"join_timeout={waits.join},probe_timeout={waits.probe},suspect_timeout={waits.suspect},"
            f"stop_grace={waits.stop_grace},flow_timeout={waits.flow},"
            f"hang_timeout={job.health.hang_timeout},partial_exit_timeout={job.health.partial_exit}",
            f"--max-restarts={job.max_restarts}",
            f"--changes-per-hour={job.nodes.changes_per_hour}",
            *(() if job.health.preflight else ("--preflight=off",)),
            f"--run-dir={directory}",
            f"--job={directory / 'job.json'}",
            *(("--notices=imds",) if isinstance(job.pool, AwsPool) else ()),
        )


def provider_of(pool: LocalPool | DockerPool | AwsPool, runs: Path, *, drives: bool = False) -> NodeProvider:
    """Return where the nodes of a pool come from.

    A provider's library is imported only where its pool is used.

    Args:
        pool: Where the job trains.
        runs: Directory of all runs' directories.
        drives: Whether the caller drives the run: it alone copies what nodes say into the run's directory.

    Raises:
        RefusedInput: The pool names no base.
    """
    match pool:
        case LocalPool():
            from tasks.providers.local import LocalProvider

            return LocalProvider(runs, grace_s=GRACE_S)
        case DockerPool():
            from tasks.providers.docker import DockerProvider

            return DockerProvider(runs, pool, grace_s=GRACE_S, follow_logs=drives)
        case AwsPool():
            from tasks.providers.aws.provider import AwsProvider

            return AwsProvider(pool=pool, inventory=inventory_of(pool), runs=runs, drives=drives)


def etcd_of(
    job: JobSpec, directory: RunDirectory, *, pause: Callable[[float], None] = time.sleep
) -> EtcdService:
    """Return where the etcd of a run comes from, so that the pool's nodes can reach it.

    `pause` sleeps where a machine is waited for, and may raise to break that off.
    """
    if job.etcd.endpoints:
        return ExternalEtcd(directory, job.etcd)
    match job.pool:
        case DockerPool():
            from tasks.providers.docker_etcd import EtcdContainer

            return EtcdContainer(directory, job.pool)
        case AwsPool():
            from tasks.providers.aws.etcd import EtcdInstance

            inventory = inventory_of(job.pool, wait=pause)
            return EtcdInstance(directory=directory, pool=job.pool, inventory=inventory)
        case LocalPool():
            return EtcdProcess(directory)


def _sizes(nodes: NodeBounds) -> tuple[str, ...]:
    if nodes.sizes:
        return (f"--node-sizes={','.join(map(str, nodes.allowed.listed))}",)
    return (f"--node-sizes=x{nodes.multiple_of}",) if nodes.multiple_of > 1 else ()


def inventory_of(pool: AwsPool, *, wait: Callable[[float], None] = time.sleep) -> Inventory:
    """Return where the instances of a pool's cluster are found; `wait` sleeps where one is waited for.

    Raises:
        RefusedInput: The pool's base cannot be read, or is another cluster's.
    """
    from tasks.providers.aws.base import base_of
    from tasks.providers.aws.inventory import AwsClients, Inventory

    return Inventory(base=base_of(pool), clients=AwsClients.of(pool), wait=wait)


def _program(training: ClassyTraining | ScriptTraining) -> tuple[str, ...]:
    match training:
        case ClassyTraining():
            preload = "--preload=elastic_core.trainer.classy.preload"
            return ("--worker-api=elastic", preload, "-m", "elastic_core.trainer", "run")
        case ScriptTraining():
            return (
                "--worker-api=torchrun",
                f"--start-method={training.start_method}",
                *(f"--preload={module}" for module in training.preload),
                *_ENTRY[training.entry],
                training.script,
                *training.args,
            )
