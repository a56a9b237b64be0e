"""The Docker engine of this machine: how everything that we make on it is found, confined and named.

Labels name run, role and node. What the engine says no to is told as what to do about it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import LogConfig, Mount, Ulimit
from requests.exceptions import RequestException

from elastic_core.errors import InvalidRequest, ProviderError, ProviderUnavailable, RefusedInput
from elastic_core.ids import RunId
from elastic_core.store.endpoint import Endpoint

RUN_LABEL: Final = "elastic.run"
NODE_LABEL: Final = "elastic.node"
TOKEN_LABEL: Final = "elastic.token"  # noqa: S105 (a label)
ROLE_LABEL: Final = "elastic.role"
RUNS_LABEL: Final = "elastic.runs"
"""Directory of all runs' directories: an engine may serve several, and each looks after its own only."""

USER: Final = 1000
"""Uid and gid inside the container where the flow itself runs as root."""

CONFLICT: Final = 409


class SurvivingContainers(ProviderError):
    """Some containers could not be removed; everything else was."""

    def __init__(self, survivors: Mapping[str, str]) -> None:
        self.survivors = dict(survivors)
        told = "; ".join(f"{name}: {why}" for name, why in sorted(survivors.items()))
        super().__init__(f"{len(survivors)} container(s) could not be removed: {told}")


def connect() -> Any:
    """Return a client of the environment's engine.

    Raises:
        ProviderUnavailable: No engine answers; the message says how to start one.
        RefusedInput: `DOCKER_HOST` names another machine.
    """
    host = os.environ.get("DOCKER_HOST", "")
    _require_local(host)
    try:
        client = docker.from_env()
        client.ping()
    except (DockerException, RequestException) as error:
        raise ProviderUnavailable(
            f"no Docker engine answers at {host or 'the local socket'}: "
            "start one (`systemctl start docker`) or set DOCKER_HOST"
        ) from error
    return client


def require_image(client: Any, image: str) -> None:
    """Return if the image is there; fetch it if it is not.

    Raises:
        InvalidRequest: It cannot be fetched either.
    """
    try:
        client.images.get(image)
    except ImageNotFound:
        try:
            client.images.pull(image)
        except (APIError, ImageNotFound) as error:
            raise InvalidRequest(_no_image(image, error)) from error


def check_image(client: Any, image: str) -> None:
    """Return if the image is there or its registry has it; nothing is fetched.

    Raises:
        RefusedInput: Neither.
    """
    try:
        client.images.get(image)
    except ImageNotFound:
        try:
            client.images.get_registry_data(image)
        except (APIError, ImageNotFound) as error:
            raise RefusedInput([_no_image(image, error)]) from error


def network_of(client: Any, run: RunId, runs: Path) -> str:
    """Return the name of the run's private network, made if there is none."""
    name = f"elastic-{run}"
    if not client.networks.list(names=[f"^{name}$"]):
        client.networks.create(name, driver="bridge", labels={RUN_LABEL: run, RUNS_LABEL: str(runs)})
    return name


def containers_of(client: Any, run: RunId, role: str = "") -> list[Any]:
    """Return the run's containers, ended ones too."""
    labels = [f"{RUN_LABEL}={run}", *([f"{ROLE_LABEL}={role}"] if role else [])]
    return list(client.containers.list(all=True, filters={"label": labels}, ignore_removed=True))


def remove_networks(client: Any, run: RunId) -> None:
    """Remove the run's network."""
    for network in client.networks.list(filters={"label": f"{RUN_LABEL}={run}"}):
        with suppress(NotFound):
            network.remove()


def confined() -> dict[str, Any]:
    """Return what every container of ours is confined to: no rights, no writable root, bounded logs.

    Restarts are the rendezvous's business, never the engine's.
    """
    return {
        "init": True,  # process 1 reaps orphans and passes SIGTERM on
        "restart_policy": {"Name": "no"},
        "read_only": True,
        "tmpfs": {"/tmp": "rw,exec,mode=1777"},  # noqa: S108 (the container's own)
        "log_config": LogConfig(type="json-file", config={"max-size": "10m", "max-file": "3"}),
        "ulimits": [Ulimit(name="core", soft=0, hard=0)],
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges"],
        "stop_signal": "SIGTERM",
    }


def same_path(directory: Path) -> Mount:
    """Return the mount of a directory at its own path, so that paths mean the same inside."""
    return Mount(str(directory), str(directory), type="bind")


def user_for(directory: Path) -> str:
    """Return who a container runs as: never root, and able to write the directory, which is made."""
    directory.mkdir(parents=True, exist_ok=True)
    if os.getuid() != 0:
        return f"{os.getuid()}:{os.getgid()}"
    for parent, _, files in os.walk(directory):
        for path in (parent, *(os.path.join(parent, file) for file in files)):  # noqa: PTH118 (of strings)
            with suppress(FileNotFoundError):  # nodes that train replace their files meanwhile
                if os.lstat(path).st_uid != USER:
                    os.chown(path, USER, USER, follow_symlinks=False)
    return f"{USER}:{USER}"


def stop(container: Any, grace_s: float) -> None:
    """SIGTERM, then SIGKILL after the grace; returns when it has ended."""
    if container.status in ("running", "paused", "restarting"):
        container.stop(timeout=int(grace_s))


def remove(container: Any) -> None:
    """Remove a container whatever its state; one that is gone already is removed."""
    with suppress(NotFound):
        container.remove(force=True, v=True)


def each(containers: Sequence[Any], act: Callable[[Any], None]) -> dict[str, str]:
    """Do one thing to all containers at once; return the name and reason of each that refused."""

    def attempt(container: Any) -> tuple[str, str] | None:
        try:
            act(container)
        except NotFound:
            return None
        except (DockerException, RequestException) as error:
            return str(container.name), str(getattr(error, "explanation", None) or error)
        return None

    if not containers:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(containers))) as pool:
        return dict(failure for failure in pool.map(attempt, containers) if failure)


@contextmanager
def named() -> Iterator[None]:
    """Turn the engine's errors into those that say what to do.

    The engine says 500 to many a mistake of ours, so whatever it answers is a refusal: only silence
    means to ask again.
    """
    try:
        yield
    except APIError as error:
        raise InvalidRequest(f"the Docker engine refused: {error.explanation}") from error
    except (DockerException, RequestException) as error:
        raise ProviderUnavailable(f"the Docker engine does not answer: {error}") from error


def _no_image(image: str, error: APIError) -> str:
    return (
        f"pool.image: {image!r} is not on {os.environ.get('DOCKER_HOST', 'this machine')} and no registry "
        f"has it ({error.explanation or error}): build it with `make image`, or name one that exists"
    )


def _require_local(host: str) -> None:
    """Refuse an engine elsewhere: it could neither mount the run's directory nor be reached on loopback."""
    address = urlsplit(host)
    if address.scheme in ("", "unix", "npipe", "fd") or Endpoint(address.hostname or "").is_loopback:
        return
    raise RefusedInput(
        [
            f"DOCKER_HOST: {host!r} is another machine, where the run's directory is not: "
            "use an engine of this machine, or pool.kind 'aws'"
        ]
    )
