"""Docker Compose files in which one service trains and another one is its etcd."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path as FilePath
from typing import Any, Final

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document, Path
from tasks.importers.draft import Draft, Foreign, tell_unknown, understand
from tasks.importers.launcher import Launch, is_launcher, read_command, read_flags
from tasks.importers.launches import apply_launch

_UNITS: Final = {"": 1 / 2**30, "b": 1 / 2**30, "k": 1 / 2**20, "m": 1 / 2**10, "g": 1.0}


class Service(Foreign):
    """One service; what only concerns its network has no field and is told."""

    image: str = ""
    command: str | list[str | int | float] = ""
    volumes: tuple[Any, ...] = ()
    shm_size: str | int = ""
    environment: Any = None
    networks: Any = None
    ports: Any = None
    depends_on: Any = None


class Compose(Foreign):
    """The file."""

    version: str | float = ""
    services: dict[str, Service]
    networks: Any = None


def translate(document: Document, gpus: Callable[[], int]) -> Draft:
    """Return the job that a Compose file starts.

    Raises:
        RefusedInput: No service, or more than one, starts a launcher.
    """
    compose = understand(Compose, document)
    draft = Draft(document.source)
    launches = {
        name: launch
        for name, service in compose.services.items()
        if (launch := _launch(document, name, service)) is not None
    }
    if len(launches) != 1:
        found = ", ".join(launches) or "none"
        raise RefusedInput([f"{document.source}: services: one of them must call a launcher; found: {found}"])
    name, launch = next(iter(launches.items()))
    for other, service in compose.services.items():
        if other != name:
            why = (
                "a run brings its own etcd"
                if "etcd" in f"{other}{service.image}"
                else "only the trainer is run"
            )
            draft.drop(document.at(("services", other)), service.image, why)
    path: Path = ("services", name)
    draft.set("pool.kind", "docker")
    draft.name(name, document.at(path))
    _options(draft, compose.services[name], document, path)
    apply_launch(draft, launch, document.at((*path, "command")), gpus=gpus)
    tell_unknown(draft, compose, document)
    return draft


def _launch(document: Document, name: str, service: Service) -> Launch | None:
    """Return the launch of a service; an image of torchelastic takes the launcher's flags alone."""
    place = f"{document.source}: {document.at(('services', name, 'command'))}"
    command = service.command
    try:
        words = shlex.split(command) if isinstance(command, str) else [str(word) for word in command]
        if is_launcher(words):
            return read_command(words)
        if words and words[0].startswith("--") and any(word.startswith(("--rdzv", "--nn")) for word in words):
            return read_flags(words)
    except ValueError as error:
        raise RefusedInput([f"{place}: {command!r} cannot be split into words: {error}"]) from error
    except RefusedInput as refusal:
        raise RefusedInput([f"{place}: {problem}" for problem in refusal.problems]) from refusal
    return None


def _options(draft: Draft, service: Service, document: Document, path: Path) -> None:
    if service.image:
        draft.say(
            document.at((*path, "image")),
            f"{service.image!r} becomes 'elastic-train:latest': a node needs elastic-agent; build on it with "
            f"`make image BASE={service.image}`, if it has Python 3.11 or newer",
        )
    if service.shm_size != "":
        draft.set("pool.shm_gib", _gib(service.shm_size, document.at((*path, "shm_size"))))
    if service.environment:
        draft.drop(
            document.at((*path, "environment")),
            service.environment,
            "set variables in the image or in the script",
        )
    for number, volume in enumerate(service.volumes):
        _mount(draft, volume, document.at((*path, "volumes", number)))


def _mount(draft: Draft, volume: Any, place: str) -> None:
    source, _, rest = str(volume).partition(":")
    target, _, mode = rest.partition(":")
    if not isinstance(volume, str) or not target.startswith("/") or source[:1] not in ("/", "~", "."):
        draft.drop(place, volume, "only directories of this machine are mounted")
        return
    mount = {"source": str(FilePath(source).expanduser()), "target": target, "read_only": mode == "ro"}
    draft.set("pool.mounts", [*draft.get("pool.mounts", []), mount])


def _gib(size: str | int, place: str) -> float:
    match = re.fullmatch(r"(\d{1,15})([bkmg]?)b?", str(size).lower())
    if not match:
        raise RefusedInput([f"{place}: {size!r} is no size like 512m or 2g"])
    return round(int(match[1]) * _UNITS[match[2]], 4)
