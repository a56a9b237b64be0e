"""ElasticJob: of pytorch/elastic (elastic.pytorch.org), and of DLRover (elastic.iml.github.io)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pydantic import Field

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document
from tasks.importers.draft import Camel, Draft, tell_unknown, understand
from tasks.importers.launches import tell_rendezvous
from tasks.importers.pods import Metadata, Replicas, read_container, read_metadata, read_restarts

_DLROVER: Final = "elastic.iml.github.io"


class Spec(Camel):
    """What an ElasticJob asks for."""

    rdzv_endpoint: str = ""
    min_replicas: int | None = Field(None, ge=0)
    max_replicas: int | None = Field(None, ge=0)
    replica_specs: dict[str, Replicas]
    ttl_seconds_after_finished: int | None = None
    distribution_strategy: str = ""
    optimize_mode: str = ""


class ElasticJob(Camel):
    """The file."""

    api_version: str
    kind: str
    metadata: Metadata = Metadata()
    spec: Spec


def translate(document: Document, pool: str, gpus: Callable[[], int]) -> Draft:
    """Return the job that an ElasticJob describes.

    Raises:
        RefusedInput: It cannot be understood.
    """
    job = understand(ElasticJob, document)
    draft = Draft(document.source)
    read_metadata(draft, job.metadata, document)
    draft.set("pool.kind", pool)
    spec = job.spec
    name = next((name for name in spec.replica_specs if name.lower() == "worker"), None)
    if name is None:
        raise RefusedInput(
            [f"{document.source}: {document.at(('spec', 'replicaSpecs'))}: needs an entry 'Worker'"]
        )
    workers, path = spec.replica_specs[name], ("spec", "replicaSpecs", name)
    for other in spec.replica_specs:
        if other != name:
            draft.drop(document.at(("spec", "replicaSpecs", other)), other, "only workers are launched")
    is_dlrovers = job.api_version.startswith(_DLROVER)
    if not is_dlrovers or spec.min_replicas is not None:
        least = workers.replicas if spec.min_replicas is None else spec.min_replicas
        most = workers.replicas if spec.max_replicas is None else spec.max_replicas
        place = document.at((*path, "replicas"))
        draft.nodes(least=least, most=most, target=workers.replicas, place=place)
    _ends(draft, spec, document)
    tell_rendezvous(
        draft, "" if is_dlrovers else "etcd", spec.rdzv_endpoint, document.at(("spec", "rdzvEndpoint"))
    )
    restart = workers.restart_policy or workers.template.spec.restart_policy
    read_restarts(draft, restart, document.at((*path, "restartPolicy")))
    if workers.restart_count is not None:
        draft.set("max_restarts", workers.restart_count)
    read_container(draft, workers, document, path, gpus=gpus, takes_flags=True)
    tell_unknown(draft, job, document)
    return draft


def _ends(draft: Draft, spec: Spec, document: Document) -> None:
    if spec.ttl_seconds_after_finished is not None:
        draft.drop(
            document.at(("spec", "ttlSecondsAfterFinished")),
            spec.ttl_seconds_after_finished,
            "nodes are removed as soon as the run ends",
        )
    if spec.distribution_strategy not in ("", "AllreduceStrategy"):
        raise RefusedInput(
            [
                f"{document.source}: {document.at(('spec', 'distributionStrategy'))}: "
                f"{spec.distribution_strategy!r} is not trained here, only 'AllreduceStrategy'"
            ]
        )
    if spec.optimize_mode not in ("", "single-job"):
        draft.drop(document.at(("spec", "optimizeMode")), spec.optimize_mode, "nodes are what the job says")
