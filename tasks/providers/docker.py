"""Docker nodes: one container a node, found by label, on a private network of the run.

Truth lives with the engine: labels name run, node and token, and a name is made
once. Containers are kept until teardown, so that their exit causes can be read;
what became of them is then kept beside the run's other records. Restarts are the
rendezvous's business, so the engine's policy is `no`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import docker
from docker.errors import APIError, DockerException, ImageNotFound, NotFound
from docker.types import DeviceRequest, LogConfig, Mount, Ulimit

from elastic_core.cluster.provider import (
    Instance,
    InstanceState,
    InterruptionNotice,
    LaunchRequest,
    LaunchResult,
)
from elastic_core.errors import InvalidRequest, ProviderError, ProviderUnavailable
from elastic_core.ids import RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import DockerPool

RUN_LABEL: Final = "elastic.run"
NODE_LABEL: Final = "elastic.node"
TOKEN_LABEL: Final = "elastic.token"  # noqa: S105 (a label)
ROLE_LABEL: Final = "elastic.role"

USER: Final = 1000
"""Uid and gid inside the container where the flow itself runs as root."""

_CONFLICT: Final = 409
_STATES: Final[Mapping[str, InstanceState]] = {
    "created": InstanceState.PENDING,
    "restarting": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "paused": InstanceState.RUNNING,  # the lease decides whether a frozen node is a member
    "removing": InstanceState.STOPPING,
    "exited": InstanceState.ENDED,
    "dead": InstanceState.ENDED,
}


class SurvivingContainers(ProviderError):
    """Some containers could not be removed; everything else was."""

    def __init__(self, survivors: Mapping[str, str]) -> None:
        self.survivors = dict(survivors)
        told = "; ".join(f"{name}: {why}" for name, why in sorted(survivors.items()))
        super().__init__(f"{len(survivors)} container(s) could not be removed: {told}")


class DockerProvider:
    """Nodes as containers (`elastic_core.cluster.provider.NodeProvider`).

    Args:
        runs: Directory of all runs' directories, on the engine's machine; a run's own directory is
            mounted at the same path in its containers.
        pool: Image, sizes and mounts.
        grace_s: Time between SIGTERM and SIGKILL of a container's agent.
        client: The engine; by default the one of the environment (`DOCKER_HOST`).
    """

    def __init__(
        self, runs: Path, pool: DockerPool, *, grace_s: float = 35.0, client: Any | None = None
    ) -> None:
        self._runs = runs.absolute()
        self._pool = pool
        self._grace_s = grace_s
        self._client = client if client is not None else connect()

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Start containers; those that the token made before are returned as they are."""
        with _named():
            self._require_image()
            network = self.ensure_network(request.run)
            known = self._containers(request.run)
            mine = [c for c in known if c.labels.get(TOKEN_LABEL) == request.token]
            ended = [node for node in self._kept(request.run) if node[0] == request.token]
            highest = max(
                [_number(c.labels[NODE_LABEL]) for c in known]
                + [_number(instance.name) for _, instance in self._kept(request.run)],
                default=0,
            )
            missing = request.count - len(mine) - len(ended)
            names = [f"node-{number}" for number in range(highest + 1, highest + 1 + missing)]
            mine.extend([self._create(request, name, network) for name in names])
            for container in mine:
                container.reload()
                if container.status == "created":  # our starter died between create and start
                    container.start()
                    container.reload()
            launched = [*(node for _, node in ended), *(self._instance(c) for c in mine)]
            return LaunchResult(launched=tuple(sorted(launched, key=lambda node: _number(node.name))))

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """Stop containers all at once: SIGTERM, then SIGKILL after the grace."""
        with _named():
            chosen = [c for c in self._containers(run) if c.labels.get(NODE_LABEL) in names]
            _each(chosen, self._stop)

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return all nodes that were ever launched for a run, by age."""
        with _named():
            nodes = {instance.name: instance for _, instance in self._kept(run)}
            nodes.update({c.labels[NODE_LABEL]: self._instance(c) for c in self._containers(run)})
            return sorted(nodes.values(), key=lambda node: _number(node.name))

    def interruptions(self, run: RunId) -> Sequence[InterruptionNotice]:  # noqa: ARG002
        """Return nothing: an engine takes no container away."""
        return ()

    def teardown(self, run: RunId) -> None:
        """Stop and remove all containers of a run and its network.

        Raises:
            SurvivingContainers: Some could not be removed; the others were.
        """
        with _named():
            containers = self._containers(run, role=None)
            failed = _each(containers, self._stop)
            for container in containers:
                if NODE_LABEL in container.labels and container.name not in failed:
                    container.reload()
                    self._keep(run, container)
            failed |= _each(containers, _remove)
            if failed:
                raise SurvivingContainers(failed)
            for network in self._client.networks.list(filters={"label": f"{RUN_LABEL}={run}"}):
                network.remove()

    # ---- making --------------------------------------------------------------------------------

    def ensure_network(self, run: RunId) -> str:
        """Return the name of the run's private network, made if there is none."""
        name = f"elastic-{run}"
        if not self._client.networks.list(names=[f"^{name}$"]):
            self._client.networks.create(name, driver="bridge", labels={RUN_LABEL: run})
        return name

    def _require_image(self) -> None:
        try:
            self._client.images.get(self._pool.image)
        except ImageNotFound:
            self._pull()

    def _pull(self) -> None:
        try:
            self._client.images.pull(self._pool.image)
        except (APIError, ImageNotFound) as error:
            raise InvalidRequest(
                f"pool.image: {self._pool.image!r} is not on {self._engine()} and could not be pulled "
                f"({error.explanation or error}): build it with `make image`, or name one that exists"
            ) from error

    def _engine(self) -> str:
        return os.environ.get("DOCKER_HOST", "this machine's engine")

    def _create(self, request: LaunchRequest, node: str, network: str) -> Any:
        name = f"elastic-{request.run}-{node}"
        try:
            return self._client.containers.create(
                self._pool.image,
                ["--name", node, *request.command],
                name=name,
                hostname=node,
                network=network,
                environment=dict(request.environment),
                labels={
                    RUN_LABEL: request.run,
                    NODE_LABEL: node,
                    TOKEN_LABEL: request.token,
                    ROLE_LABEL: "node",
                },
                **self._limits(),
                mounts=self._mounts(request.run),
                user=self._user(request.run),
            )
        except APIError as error:
            if error.status_code != _CONFLICT:
                raise
            # The reply of an earlier create was lost, or a stranger has the name.
            container = self._client.containers.get(name)
            if container.labels.get(TOKEN_LABEL) == request.token:
                return container
            raise InvalidRequest(
                f"container {name} exists and is not ours: remove it, or give the run another name"
            ) from error

    def _limits(self) -> dict[str, Any]:
        pool = self._pool
        limits: dict[str, Any] = {
            "init": True,  # process 1 reaps orphans and passes SIGTERM on
            "restart_policy": {"Name": "no"},
            "read_only": True,
            "tmpfs": {"/tmp": "rw,exec,mode=1777"},  # noqa: S108 (the container's own)
            "shm_size": int(pool.shm_gib * 2**30),
            "log_config": LogConfig(type="json-file", config={"max-size": "10m", "max-file": "3"}),
            "ulimits": [Ulimit(name="core", soft=0, hard=0)],
            "cap_drop": ["ALL"],
            "security_opt": ["no-new-privileges"],
            "stop_signal": "SIGTERM",
        }
        if pool.memory_gib:
            limits["mem_limit"] = limits["memswap_limit"] = int(pool.memory_gib * 2**30)
        if pool.cpus:
            limits["nano_cpus"] = int(pool.cpus * 1e9)
        if pool.gpus:
            limits["device_requests"] = [DeviceRequest(count=pool.gpus, capabilities=[["gpu"]])]
        return limits

    def _mounts(self, run: RunId) -> list[Mount]:
        directory = str(self._runs / run)
        given = [
            Mount(mount.target, str(Path(mount.source).absolute()), type="bind", read_only=mount.read_only)
            for mount in self._pool.mounts
        ]
        return [Mount(directory, directory, type="bind"), *given]

    def _user(self, run: RunId) -> str:
        """Return who the agent runs as: never root, and able to write the run's directory."""
        directory = self._runs / run
        directory.mkdir(parents=True, exist_ok=True)
        if os.getuid() != 0:
            return f"{os.getuid()}:{os.getgid()}"
        for path in (directory, *directory.rglob("*")):
            os.chown(path, USER, USER, follow_symlinks=False)
        return f"{USER}:{USER}"

    # ---- looking -------------------------------------------------------------------------------

    def _containers(self, run: RunId, role: str | None = "node") -> list[Any]:
        labels = [f"{RUN_LABEL}={run}", *([f"{ROLE_LABEL}={role}"] if role else [])]
        return list(self._client.containers.list(all=True, filters={"label": labels}, ignore_removed=True))

    def _instance(self, container: Any) -> Instance:
        state = container.attrs["State"]
        kind = _STATES.get(state["Status"], InstanceState.PENDING)
        networks = container.attrs["NetworkSettings"]["Networks"].values()
        ended = kind is InstanceState.ENDED
        return Instance(
            name=container.labels[NODE_LABEL],
            state=kind,
            address=next((network["IPAddress"] for network in networks if network["IPAddress"]), ""),
            exit_code=state["ExitCode"] if ended else None,
            detail=_detail(state, container.attrs["HostConfig"]["Memory"]) if ended else "",
            log=f"docker logs {container.name}",
        )

    def _kept(self, run: RunId) -> list[tuple[str, Instance]]:
        """Return token and node of every container that was removed."""
        directory = self._runs / run / "nodes"
        return [
            (path.name.split(".", 1)[1].removesuffix(".json"), decode(Instance, path.read_bytes()))
            for path in directory.glob("node-*.*.json")
        ]

    def _keep(self, run: RunId, container: Any) -> None:
        directory = self._runs / run / "nodes"
        directory.mkdir(parents=True, exist_ok=True)
        instance = self._instance(container)
        path = directory / f"{instance.name}.{container.labels[TOKEN_LABEL]}.json"
        path.write_bytes(encode(instance))

    def _stop(self, container: Any) -> None:
        if container.status in ("running", "paused", "restarting"):
            container.stop(timeout=int(self._grace_s))


def connect() -> Any:
    """Return a client of the environment's engine.

    Raises:
        ProviderUnavailable: No engine answers; the message says how to start one.
    """
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        host = os.environ.get("DOCKER_HOST", "the local socket")
        raise ProviderUnavailable(
            f"no Docker engine answers at {host}: start one (`systemctl start docker`) or set DOCKER_HOST"
        ) from error
    return client


def _detail(state: Mapping[str, Any], memory: int) -> str:
    """Return why a container ended; 137 alone does not mean out of memory."""
    if state["OOMKilled"]:
        return f"container memory limit {memory / 2**20:.0f} MiB reached"
    if state["Error"]:
        return str(state["Error"])
    code = int(state["ExitCode"])
    return f"killed ({code})" if code > 128 else ""


def _number(node: str) -> int:
    return int(node.removeprefix("node-"))


def _remove(container: Any) -> None:
    try:
        container.remove(force=True, v=True)
    except NotFound:
        return


def _each(containers: Sequence[Any], act: Any) -> dict[str, str]:
    """Do one thing to all containers at once; return the name and reason of each that refused."""

    def attempt(container: Any) -> tuple[str, str] | None:
        try:
            act(container)
        except NotFound:
            return None
        except DockerException as error:
            return str(container.name), str(getattr(error, "explanation", None) or error)
        return None

    if not containers:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(containers))) as pool:
        return dict(failure for failure in pool.map(attempt, containers) if failure)


@contextmanager
def _named() -> Iterator[None]:
    """Turn the engine's errors into those that say what to do."""
    try:
        yield
    except APIError as error:
        if error.is_server_error():
            raise ProviderUnavailable(f"the Docker engine failed: {error.explanation}") from error
        raise InvalidRequest(f"the Docker engine refused: {error.explanation}") from error
    except DockerException as error:
        raise ProviderUnavailable(f"the Docker engine does not answer: {error}") from error
