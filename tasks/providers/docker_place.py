"""What runs have on a Docker engine: containers, networks and volumes, found by label."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from docker.errors import APIError, NotFound

from elastic_core.ids import RunId
from tasks.holdings import Holding
from tasks.providers import docker_engine as engine
from tasks.providers.docker_engine import RUN_LABEL, RUNS_LABEL, named

GRACE_S: Final = 5.0


class DockerPlace:
    """Containers, networks and volumes of one runs directory (`tasks.holdings.Place`)."""

    name = "docker"

    def __init__(self, runs: Path, *, client: Any | None = None) -> None:
        self._client = client if client is not None else engine.connect()
        self._filters = {"label": [f"{RUNS_LABEL}={runs.absolute()}", RUN_LABEL]}

    def find(self) -> Sequence[Holding]:
        """Return what carries the label of this runs directory, containers first."""
        with named():
            containers = self._client.containers.list(all=True, filters=self._filters, ignore_removed=True)
            networks = self._client.networks.list(filters=self._filters)
            volumes = self._client.volumes.list(filters=self._filters)
        return [
            *(_holding("container", one.name, one.labels, one.status) for one in containers),
            *(_holding("network", one.name, one.attrs["Labels"]) for one in networks),
            *(_holding("volume", one.name, one.attrs["Labels"]) for one in volumes),
        ]

    def remove(self, holdings: Sequence[Holding]) -> dict[str, str]:
        """Stop and remove containers all at once, then the networks and volumes that they used."""
        names = {kind: [one.name for one in holdings if one.kind == kind] for kind in _KINDS}
        with named():
            containers = [
                one
                for one in self._client.containers.list(all=True, filters=self._filters, ignore_removed=True)
                if one.name in names["container"]
            ]
            failed = engine.each(containers, lambda one: engine.stop(one, GRACE_S))
            failed |= engine.each(containers, engine.remove)
            for kind, collection in (("network", self._client.networks), ("volume", self._client.volumes)):
                for name in names[kind]:
                    try:
                        collection.get(name).remove()
                    except NotFound:
                        continue
                    except APIError as error:
                        failed[name] = str(error.explanation)
        return failed


_KINDS: Final = ("container", "network", "volume")


def _holding(kind: str, name: str, labels: dict[str, str], detail: str = "") -> Holding:
    return Holding(place="docker", kind=kind, name=name, run=RunId(labels[RUN_LABEL]), detail=detail)
