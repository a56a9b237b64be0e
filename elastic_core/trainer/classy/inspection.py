"""What can be said of a Classy Vision config by building it and training it a little.

Each part is built apart, so that one mistake does not hide another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch.nn.modules.loss as torch_losses
from torchvision import transforms as torchvision_transforms

from elastic_core.errors import RefusedInput
from elastic_core.model.job_file import nearest
from elastic_core.trainer.classy import compat
from elastic_core.trainer.classy.problems import ROOT, at, listed
from elastic_core.trainer.classy.recording import RecordingDict
from elastic_core.trainer.classy.task import elastic_class

_Build = Callable[[Any], Any]

_TOLERATED: Final = frozenset(("num_epochs", "num_classes", "use_augmentation"))
"""Keys that parts need not ask for: Classy Vision hands the first to all schedules, and its own configs
still hold the others, which once meant something (heads and transforms decide)."""


@dataclass(slots=True)
class Parts:
    """What could be built of a config, and what was wrong with it."""

    problems: list[str] = field(default_factory=list)
    built: dict[str, Any] = field(default_factory=dict)


def inspect(config: Mapping[str, Any]) -> Parts:
    """Look up every name and build every part of a config that reading found nothing against."""
    parts = Parts()
    parts.problems += _unknown_names(config)
    wrong = [problem.split(":")[0] for problem in parts.problems]
    for path, section, build in _sections(config):
        if any(place.startswith(path) for place in wrong):
            continue  # what has no meaning cannot be built
        _build(parts, path, section, build)
    return parts


# ---- names -------------------------------------------------------------------------------------


def _unknown_names(config: Mapping[str, Any]) -> Iterator[str]:
    try:
        elastic_class(config["name"])
    except RefusedInput as refusal:
        yield from (f"{ROOT}.{problem}" for problem in refusal.problems)
    for phase, section in config["dataset"].items():
        if section is not None:
            place = at(ROOT, "dataset", phase)
            yield from _name(section, place, "dataset", compat.DATASET_REGISTRY)
            yield from _transforms(section.get("transforms") or [], at(place, "transforms"))
    model = config["model"]
    yield from _name(model, at(ROOT, "model"), "model", compat.MODEL_REGISTRY)
    for number, head in enumerate(model.get("heads") or []):
        yield from _name(head, at(ROOT, "model", "heads", number), "head", compat.HEAD_REGISTRY)
    losses = {*compat.LOSS_REGISTRY, *(name for name in dir(torch_losses) if name.endswith("Loss"))}
    yield from _name(config["loss"], at(ROOT, "loss"), "loss", losses)
    optimizer = at(ROOT, "optimizer")
    yield from _name(config["optimizer"], optimizer, "optimizer", compat.OPTIMIZER_REGISTRY)
    for option, schedule in (config["optimizer"].get("param_schedulers") or {}).items():
        yield from _schedule(schedule, at(optimizer, "param_schedulers", option))
    for name in config["meters"]:
        if name not in compat.METER_REGISTRY:
            yield _unregistered(at(ROOT, "meters", name), "meter", name, compat.METER_REGISTRY)


def _name(section: Mapping[str, Any], path: str, kind: str, known: Iterable[str]) -> Iterator[str]:
    name = section.get("name")
    if name is None:
        yield f"{at(path, 'name')}: is required; known: {listed(known)}"
    elif name not in known:
        yield _unregistered(at(path, "name"), kind, name, known)


def _unregistered(path: str, kind: str, name: object, known: Iterable[str]) -> str:
    return (
        f"{path}: {kind} {name!r} is not registered{nearest(str(name), known)}; known: {listed(known)}; "
        "set training.user_package if it is your own"
    )


def _schedule(section: Any, path: str) -> Iterator[str]:
    if not isinstance(section, Mapping):
        yield f"{path}: is {section!r}; it must be a schedule like {{'name': 'constant', 'value': 0.1}}"
        return
    yield from _name(section, path, "schedule", compat.PARAM_SCHEDULER_REGISTRY)
    for number, inner in enumerate(section.get("schedulers") or []):
        yield from _schedule(inner, at(path, "schedulers", number))


def _transforms(sections: Iterable[Any], path: str) -> Iterator[str]:
    of_torchvision = [name for name in dir(torchvision_transforms) if name[0].isupper()]
    for number, section in enumerate(sections):
        place = at(path, number)
        name = section.get("name")
        known = {*compat.TRANSFORM_REGISTRY, *of_torchvision}
        as_torchvision = str(name).title().replace("_", "")  # Classy Vision takes random_crop for RandomCrop
        if name not in known and as_torchvision not in known:
            yield from _name(section, place, "transform", known)
        yield from _transforms(section.get("transforms") or [], at(place, "transforms"))


# ---- building ----------------------------------------------------------------------------------


def _sections(config: Mapping[str, Any]) -> Iterator[tuple[str, Any, _Build]]:
    for phase, section in config["dataset"].items():
        if section is not None:
            yield at(ROOT, "dataset", phase), section, compat.build_dataset
    yield at(ROOT, "model"), config["model"], compat.build_model
    yield at(ROOT, "loss"), config["loss"], compat.build_loss
    optimizer, path = config["optimizer"], at(ROOT, "optimizer")
    plain = {key: value for key, value in optimizer.items() if key not in ("param_schedulers", "num_epochs")}
    yield path, plain, lambda section: compat.OPTIMIZER_REGISTRY[section["name"]].from_config(section)
    for option, schedule in (optimizer.get("param_schedulers") or {}).items():
        place = at(path, "param_schedulers", option)
        yield from _schedules(schedule, place, config["num_epochs"])
    for name, meter in config["meters"].items():
        yield at(ROOT, "meters", name), {"name": name, **meter}, compat.build_meter


def _schedules(section: Mapping[str, Any], path: str, epochs: int) -> Iterator[tuple[str, Any, _Build]]:
    def build(asked: RecordingDict) -> Any:
        asked.asked.add("update_interval")  # of the schedule that this one may be part of
        return compat.build_param_scheduler(asked)

    yield path, {**section, "num_epochs": epochs}, build
    for number, inner in enumerate(section.get("schedulers") or []):
        yield from _schedules(inner, at(path, "schedulers", number), epochs)


def _build(parts: Parts, path: str, section: Any, build: _Build) -> None:
    asked = RecordingDict(copy.deepcopy(section))
    try:
        parts.built[path] = build(asked)
    except Exception as error:  # whatever a component raises over its config is a problem of the config
        parts.problems.append(f"{path}: {word(error)}{_hint(asked)}")
        return
    parts.problems += asked.ignored(path, tolerated=_TOLERATED)


def word(error: BaseException) -> str:
    """Return an exception as a sentence; the bare ones that Classy Vision raises say too little."""
    if isinstance(error, RefusedInput):
        return "; ".join(error.problems)
    if isinstance(error, KeyError):
        return f"key {error.args[0]!r} is missing or its value is not known"
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} without a message"


def _hint(asked: RecordingDict) -> str:
    """Return what was looked for and is not there, beside what is there and was not looked for."""
    present = set(dict.keys(asked))
    absent = sorted(asked.asked - present)
    strange = sorted(present - asked.asked - {"name"})
    if not absent:
        return ""
    near = "".join(nearest(key, absent) for key in strange)
    unread = f"; nothing asked for {', '.join(map(repr, strange))}{near}" if strange else ""
    return f"; it looked for {listed(absent)}{unread}"
