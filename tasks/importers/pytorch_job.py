"""PyTorchJob of Kubeflow's training operator (kubeflow.org/v1)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pydantic import Field

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document, Path
from tasks.importers.draft import Camel, Draft, tell_unknown, understand
from tasks.importers.launches import tell_rendezvous
from tasks.importers.pods import Metadata, Replicas, read_container, read_metadata, read_restarts


class ElasticPolicy(Camel):
    """How elastic a job is."""

    rdzv_backend: str = ""
    rdzv_host: str = ""
    rdzv_port: int | None = None
    rdzv_id: str = ""
    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=0)
    max_restarts: int | None = Field(None, ge=0)
    n_proc_per_node: int | None = Field(None, ge=1)
    metrics: tuple[Any, ...] = ()


class RunPolicy(Camel):
    """How a job ends."""

    clean_pod_policy: str = ""
    ttl_seconds_after_finished: int | None = None
    active_deadline_seconds: int | None = None
    backoff_limit: int | None = Field(None, ge=0)


class Spec(Camel):
    """What a PyTorchJob asks for."""

    elastic_policy: ElasticPolicy | None = None
    run_policy: RunPolicy = RunPolicy()
    nproc_per_node: str | int = ""
    pytorch_replica_specs: dict[str, Replicas]


class PyTorchJob(Camel):
    """The file."""

    api_version: str
    kind: str
    metadata: Metadata = Metadata()
    spec: Spec


def translate(document: Document, pool: str, gpus: Callable[[], int]) -> Draft:
    """Return the job that a PyTorchJob describes.

    Raises:
        RefusedInput: It cannot be understood.
    """
    job = understand(PyTorchJob, document)
    draft = Draft(document.source)
    read_metadata(draft, job.metadata, document)
    draft.set("pool.kind", pool)
    replicas = job.spec.pytorch_replica_specs
    name = next((name for name in ("Worker", "Master") if name in replicas), None)
    if name is None:
        place = document.at(("spec", "pytorchReplicaSpecs"))
        raise RefusedInput([f"{document.source}: {place}: needs an entry 'Worker'"])
    path: Path = ("spec", "pytorchReplicaSpecs", name)
    _nodes(draft, job.spec, document, path)
    _policies(draft, job.spec, document)
    policy = replicas[name].restart_policy
    if draft.get("max_restarts") is None:
        read_restarts(draft, policy, document.at((*path, "restartPolicy")))
    elif policy:
        draft.drop(
            document.at((*path, "restartPolicy")), policy, "maxRestarts says how often failures are mended"
        )
    read_container(draft, replicas[name], document, path, gpus=gpus, takes_flags=False)
    _workers(draft, job.spec, document)
    tell_unknown(draft, job, document)
    return draft


def _nodes(draft: Draft, spec: Spec, document: Document, path: Path) -> None:
    total = sum(replicas.replicas for replicas in spec.pytorch_replica_specs.values())
    policy = spec.elastic_policy
    least = total if policy is None or policy.min_replicas is None else policy.min_replicas
    most = total if policy is None or policy.max_replicas is None else policy.max_replicas
    draft.nodes(least=least, most=most, target=total, place=document.at((*path, "replicas")))


def _policies(draft: Draft, spec: Spec, document: Document) -> None:
    policy, place = spec.elastic_policy, ("spec", "elasticPolicy")
    if policy is not None:
        host = policy.rdzv_host
        endpoint = f"{host}:{policy.rdzv_port}" if host and policy.rdzv_port else host
        tell_rendezvous(draft, policy.rdzv_backend, endpoint, document.at(place))
        if policy.max_restarts is not None:
            draft.set("max_restarts", policy.max_restarts)
        if policy.metrics:
            draft.drop(
                document.at((*place, "metrics")),
                policy.metrics,
                "the number of nodes follows nodes.target, not the load of CPUs",
            )
    ends, place = spec.run_policy, ("spec", "runPolicy")
    if ends.backoff_limit is not None and draft.get("max_restarts") is None:
        draft.set("max_restarts", ends.backoff_limit)
    if ends.active_deadline_seconds is not None:
        seconds = ends.active_deadline_seconds
        why = f"start with `elastic-train train FILE --max-time {seconds}`"
        draft.drop(document.at((*place, "activeDeadlineSeconds")), seconds, why)
    for key, value in (("cleanPodPolicy", ends.clean_pod_policy),
                       ("ttlSecondsAfterFinished", ends.ttl_seconds_after_finished)):  # fmt: skip
        if value not in ("", None):
            draft.drop(document.at((*place, key)), value, "nodes are removed as soon as the run ends")


def _workers(draft: Draft, spec: Spec, document: Document) -> None:
    """Take the number of workers that the file says, over the one in the command."""
    said = spec.elastic_policy.n_proc_per_node if spec.elastic_policy else None
    wanted = said or (int(spec.nproc_per_node) if str(spec.nproc_per_node).isdigit() else None)
    if wanted:
        draft.set("workers_per_node", wanted)
    elif spec.nproc_per_node:
        draft.drop(
            document.at(("spec", "nprocPerNode")), spec.nproc_per_node, "the command's number is taken"
        )
