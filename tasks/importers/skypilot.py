"""SkyPilot tasks whose `run` calls torchrun."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document
from tasks.importers.draft import Draft, Foreign, tell_unknown, understand
from tasks.importers.gpus import TYPES, type_with
from tasks.importers.launcher import read_command
from tasks.importers.launches import apply_launch
from tasks.importers.shell import find_call


class Resources(Foreign):
    """The machine that a node is."""

    infra: str = ""
    cloud: str = ""
    region: str = ""
    instance_type: str = ""
    accelerators: str | dict[str, int] | None = None
    use_spot: bool = False
    cpus: str | int | float | None = None
    memory: str | int | float | None = None


class Task(Foreign):
    """The file."""

    name: str = ""
    resources: Resources = Resources()
    num_nodes: int = Field(1, ge=1)
    setup: str = ""
    run: str
    envs: dict[str, Any] = Field(default_factory=dict)


def is_task(data: Any) -> bool:
    """Return whether data are a SkyPilot task."""
    return (
        isinstance(data, dict) and "run" in data and bool({"resources", "num_nodes", "setup"} & data.keys())
    )


def translate(document: Document) -> Draft:
    """Return the job that a task describes.

    Raises:
        RefusedInput: Its machines or its command cannot be understood.
    """
    task = understand(Task, document)
    draft = Draft(document.source)
    draft.name(task.name or "task", document.at(("name",)))
    gpus = _machines(draft, task.resources, document)
    draft.nodes(least=1, most=task.num_nodes, target=task.num_nodes, place=document.at(("num_nodes",)))
    if task.num_nodes > 1:
        draft.say(
            document.at(("num_nodes",)), f"{task.num_nodes} becomes the target; training goes on with fewer"
        )
    if task.setup:
        draft.drop(document.at(("setup",)), task.setup, "it is not run: put what it installs into the image")
    if task.envs:
        names = ", ".join(task.envs)
        draft.drop(document.at(("envs",)), names, "set variables in the image or in the script")
    place = document.at(("run",))
    try:
        call = find_call(task.run, place)
        known = {
            "SKYPILOT_NUM_NODES": str(task.num_nodes),
            "SKYPILOT_NUM_GPUS_PER_NODE": str(max(gpus, 1)),
            "SKYPILOT_TASK_ID": task.name,
        }
        launch = read_command(call.words, known)
    except RefusedInput as refusal:
        raise RefusedInput(
            [f"{document.source}: {_placed(line, place)}" for line in refusal.problems]
        ) from refusal
    if call.skipped:
        draft.say(
            place,
            f"{len(call.skipped)} statements around the launcher are not run, the first of them "
            f"{call.skipped[0]!r}: put them into the image or the script",
        )
    draft.job.pop("nodes")
    if launch.nodes == (task.num_nodes, task.num_nodes):
        draft.nodes(least=1, most=task.num_nodes, target=task.num_nodes, place=place)
    apply_launch(draft, launch, place, directory=call.directory, gpus=lambda: gpus)
    tell_unknown(draft, task, document)
    return draft


def _placed(problem: str, place: str) -> str:
    return problem if problem.startswith(place) else f"{place}: {problem}"


def _machines(draft: Draft, resources: Resources, document: Document) -> int:
    """Set the pool; return how many GPUs a node has."""
    cloud, _, region = (resources.infra or resources.cloud or "aws").partition("/")
    place = document.at(("resources",))
    if cloud.lower() != "aws":
        raise RefusedInput([f"{document.source}: {place}: {cloud!r} is no pool here; there is AWS"])
    draft.set("pool", {"kind": "aws", "market": "spot" if resources.use_spot else "on-demand"})
    if region or resources.region:
        draft.set("pool.region", region or resources.region)
    for key in ("cpus", "memory"):
        if getattr(resources, key) is not None:
            value = getattr(resources, key)
            draft.drop(document.at(("resources", key)), value, "pool.instance_types names types, not sizes")
    return _types(draft, resources, document)


def _types(draft: Draft, resources: Resources, document: Document) -> int:
    model, count = _accelerator(resources.accelerators, document)
    if resources.instance_type:
        draft.set("pool.instance_types", [resources.instance_type])
        return count
    place = document.at(("resources", "accelerators"))
    if not model:
        raise RefusedInput([f"{document.source}: {place}: name an instance_type, or GPUs like T4:1"])
    found = type_with(model, count)
    if found is None:
        known = ", ".join(TYPES)
        raise RefusedInput(
            [f"{document.source}: {place}: no EC2 type with {model}:{count} is known; known: {known}"]
        )
    has, name = found
    draft.set("pool.instance_types", [name])
    if has != count:
        draft.say(place, f"{model}:{count} becomes {name}, the smallest type with as many; it has {has}")
    return count


def _accelerator(text: str | dict[str, int] | None, document: Document) -> tuple[str, int]:
    if not text:
        return "", 0
    if isinstance(text, dict):
        return next(iter(text.items()))
    model, _, count = text.partition(":")
    if count and not (count.isascii() and count.isdigit() and 0 < int(count) < 100):
        place = document.at(("resources", "accelerators"))
        raise RefusedInput([f"{document.source}: {place}: {text!r} is no accelerator like T4:1"])
    return model, int(count or 1)
