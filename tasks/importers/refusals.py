"""Files that are no job of ours: each is refused with the reason and what to write instead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document

_TLS: Final = {"ETCD_CACERT": "--etcd-ca", "ETCD_CERT": "--etcd-cert", "ETCD_KEY": "--etcd-key"}
_RAY: Final = (
    (("min_workers",), "nodes.min"),
    (("initial_workers",), "nodes.target"),
    (("max_workers",), "nodes.max"),
    (("provider", "region"), "pool.region"),
    (("provider", "availability_zone"), "pool.zones"),
    (("worker_nodes", "InstanceType"), "pool.instance_types"),
)


def refuse_several(documents: Sequence[Document]) -> None:
    """Refuse a file of several documents."""
    group = any(isinstance(one.data, dict) and "execution" in one.data for one in documents)
    what = "a job group is not supported" if group else "one file is one job"
    raise RefusedInput(
        [f"{documents[0].source}: has {len(documents)} documents: {what}; give one task of it alone"]
    )


def refuse_scale_plan(document: Document) -> None:
    """Refuse DLRover's ScalePlan; name the command that does the same."""
    workers = _find(document.data, ("spec", "replicaResourceSpecs", "worker", "replicas"))
    number = workers if isinstance(workers, int) else "N"
    raise RefusedInput(
        [
            f"{document.source}: a ScalePlan is not a job; to give a running one another size: "
            f"elastic-train scale RUN --target {number}"
        ]
    )


def refuse_batch_job(document: Document) -> None:
    """Refuse a plain Job of Kubernetes, but translate how it reaches its etcd."""
    variables = {
        entry.get("name"): entry.get("value")
        for entry in _find(document.data, ("spec", "template", "spec", "containers", 0, "env")) or ()
        if isinstance(entry, Mapping)
    }
    told = f"{document.source}: a batch Job starts no launcher: it is no elastic job"
    if variables.get("RDZV_ENDPOINT"):
        flags = [f"--rdzv-endpoint={variables['RDZV_ENDPOINT']}"]
        flags += [f"{flag}={variables[name]}" for name, flag in _TLS.items() if variables.get(name)]
        told += f"; by hand, with its etcd: elastic-agent {' '.join(flags)} --rdzv-id=RUN SCRIPT"
    raise RefusedInput([told])


def refuse_ray(document: Document) -> None:
    """Refuse a cluster of Ray's autoscaler; name the keys that mean the same here."""
    same = [
        f"{'.'.join(path)} {value!r} is {key}"
        for path, key in _RAY
        if (value := _find(document.data, path)) is not None
    ]
    raise RefusedInput([f"{document.source}: a Ray cluster is not a job; here {'; '.join(same)}"])


def refuse_prefect(document: Document) -> None:
    """Refuse Prefect's project file."""
    raise RefusedInput(
        [
            f"{document.source}: is a prefect.yaml, not a job; copy the entry of `deployments` in ours "
            "beside yours, and deploy both with `prefect deploy --all`"
        ]
    )


def refuse_kind(document: Document, kind: object, known: Sequence[str]) -> None:
    """Refuse a Kubernetes object that is none of the known kinds."""
    raise RefusedInput(
        [f"{document.source}: {document.at(('kind',))}: {kind!r} is not read; read: {', '.join(known)}"]
    )


def _find(data: Any, path: Sequence[str | int]) -> Any:
    for key in path:
        try:
            data = data[key]
        except (KeyError, IndexError, TypeError):
            return None
    return data
