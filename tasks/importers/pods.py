"""What Kubernetes jobs have in common: a pod's template with one container that trains."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, Final

from pydantic import Field

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document, Path
from tasks.importers.draft import Camel, Draft
from tasks.importers.launcher import Launch, read_command, read_flags
from tasks.importers.launches import apply_launch, ask_gpus
from tasks.importers.shell import find_call

_SHELLS: Final = ("sh", "bash")
_UNITS: Final = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
                 "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}  # fmt: skip
_GIB: Final = 2**30

Words = str | int | float


class Variable(Camel):
    """One environment variable; its value may come from elsewhere, which is told as unknown."""

    name: str
    value: str | int | float | bool | None = None


class Resources(Camel):
    """Limits and requests of a container."""

    limits: dict[str, Words] = Field(default_factory=dict)
    requests: dict[str, Words] = Field(default_factory=dict)


class Container(Camel):
    """A container; only what a job can keep has a field."""

    name: str = ""
    image: str = ""
    image_pull_policy: str = ""
    command: tuple[Words, ...] = ()
    args: tuple[Words, ...] = ()
    env: tuple[Variable, ...] = ()
    resources: Resources = Resources()


class PodSpec(Camel):
    """A pod."""

    containers: list[Container] = Field(min_length=1)
    restart_policy: str = ""


class Template(Camel):
    """A pod's template."""

    api_version: str = ""
    kind: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)
    spec: PodSpec


class Replicas(Camel):
    """Replicas of one template."""

    replicas: int = Field(1, ge=0)
    restart_policy: str = ""
    restart_count: int | None = Field(None, ge=0)
    template: Template


class Metadata(Camel):
    """Name and place of a job."""

    name: str = "job"
    namespace: str = ""


def read_metadata(draft: Draft, metadata: Metadata, document: Document) -> None:
    """Take a job's name; a namespace has no place here."""
    draft.name(metadata.name, document.at(("metadata", "name")))
    if metadata.namespace:
        draft.drop(document.at(("metadata", "namespace")), metadata.namespace, "there are no namespaces here")


def read_restarts(draft: Draft, policy: str, place: str) -> None:
    """Translate a restart policy."""
    if policy == "Never":
        draft.set("max_restarts", 0)
    elif policy == "ExitCode":
        draft.say(
            place,
            "'ExitCode' ends a job at exit codes 1 to 127 and restarts at 128 to 255; here every failure "
            "counts towards max_restarts, and one before the first step ends the run",
        )
    elif policy:
        draft.say(place, f"{policy!r} is dropped: max_restarts says how often failures are mended")


def read_container(
    draft: Draft,
    replicas: Replicas,
    document: Document,
    path: Path,
    *,
    gpus: Callable[[], int],
    takes_flags: bool,
) -> None:
    """Fill a draft with what a replica's container says.

    Args:
        draft: The job, whose pool and nodes are set already.
        replicas: Whose container.
        document: Where it stands.
        path: Where the replicas stand in it.
        gpus: Counts the GPUs of this machine.
        takes_flags: Whether arguments without a command are the launcher's flags.

    Raises:
        RefusedInput: There is no command that is understood.
    """
    containers = (*path, "template", "spec", "containers")
    place = (*containers, 0)
    for number, other in enumerate(replicas.template.spec.containers[1:], start=1):
        draft.drop(document.at((*containers, number)), other.name, "a node runs one container")
    container = replicas.template.spec.containers[0]
    demand = _pool(draft, container, document, place)
    here = gpus() if draft.get("pool.kind") == "local" else demand
    ask_gpus(draft, demand, document.at((*place, "resources")), has_gpu=here > 0)
    for number, variable in enumerate(container.env):
        draft.drop(
            document.at((*place, "env", number)), variable.name, "set variables in the image or in the script"
        )
    where = document.at((*place, "command" if container.command else "args"))
    known = {"NODE_NUM": str(replicas.replicas), "WORKER_NUM": str(replicas.replicas)}
    launch, directory = _launch(draft, container, where, known, takes_flags)
    apply_launch(draft, launch, where, directory=directory, gpus=lambda: here)


def _launch(
    draft: Draft, container: Container, where: str, variables: Mapping[str, str], takes_flags: bool
) -> tuple[Launch, str]:
    words = [str(word) for word in (*container.command, *container.args)]
    try:
        if not words:
            raise RefusedInput([f"{where}: there is no command: name the script that trains"])
        if words[0].rsplit("/", 1)[-1] in _SHELLS and len(words) > 2 and words[1] in ("-c", "-lc"):
            call = find_call(words[2], where)
            for statement in call.skipped:
                draft.drop(where, statement, "nobody runs it; put it into the image or the script")
            return read_command(call.words, variables), call.directory
        if takes_flags and not container.command:
            return read_flags(words, variables=variables), ""
        return read_command(words, variables), ""
    except RefusedInput as refusal:
        raise RefusedInput(
            [f"{draft.origin}: {p if p.startswith(where) else f'{where}: {p}'}" for p in refusal.problems]
        ) from refusal


def _pool(draft: Draft, container: Container, document: Document, place: Path) -> int:
    """Set the pool's options; return how many GPUs a node is to have."""
    asked = container.resources.limits or container.resources.requests
    at = (*place, "resources", "limits" if container.resources.limits else "requests")
    gpus = 0
    if container.image and draft.get("pool.kind") == "docker":
        draft.say(
            document.at((*place, "image")),
            f"{container.image!r} becomes 'elastic-train:latest': a node needs elastic-agent; build on it "
            f"with `make image BASE={container.image}`, if it has Python 3.11 or newer",
        )
    for key, value in asked.items():
        if key.endswith("/gpu"):
            gpus = int(_quantity(value, document.at((*at, key))))
            if draft.get("pool.kind") == "docker":
                draft.set("pool.gpus", gpus)
        elif key == "cpu" and draft.get("pool.kind") == "docker":
            draft.set("pool.cpus", _quantity(value, document.at((*at, key))))
        elif key == "memory" and draft.get("pool.kind") == "docker":
            draft.set("pool.memory_gib", round(_quantity(value, document.at((*at, key))) / _GIB, 3))
        else:
            draft.drop(document.at((*at, key)), value, "the pool has no such limit")
    return gpus


def _quantity(value: Words, place: str) -> float:
    """Return a Kubernetes quantity as a number: 500m, 2Gi, 4."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d{1,9})?)(m|[kMGT]i?|Ki)?", str(value))
    if not match:
        raise RefusedInput([f"{place}: {value!r} is no quantity like 4, 500m or 2Gi"])
    number, unit = float(match[1]), match[2] or ""
    result = number / 1000 if unit == "m" else number * _UNITS[unit]
    if not math.isfinite(result):
        raise RefusedInput([f"{place}: {value!r} is too much"])
    return result
