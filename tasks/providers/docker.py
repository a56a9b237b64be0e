"""Docker nodes: one container a node, found by label, on a private network of the run.

Truth lives with the engine: labels name run, node and token, and a name is made
once. Containers are kept until teardown, so that their exit causes can be read;
what became of them is then kept beside the run's other records.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from docker.errors import APIError
from docker.types import DeviceRequest, Mount

from elastic_core.cluster.provider import (
    Instance,
    InstanceState,
    InterruptionNotice,
    LaunchRequest,
    LaunchResult,
)
from elastic_core.errors import InvalidRequest
from elastic_core.ids import RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import DockerPool
from tasks.providers import docker_engine as engine
from tasks.providers.docker_engine import NODE_LABEL, ROLE_LABEL, RUN_LABEL, RUNS_LABEL, TOKEN_LABEL, named
from tasks.providers.docker_logs import LogFollowers

NODE: Final = "node"
"""Role of a container that is a node."""

HOME: Final[Mapping[str, str]] = {"HOME": "/tmp", "USER": "elastic"}  # noqa: S108 (the container's own)
"""The flow's uid may have no name and no home in the image; libraries cache where they can write."""

LAST_LINES_S: Final = 5.0

_STATES: Final[Mapping[str, InstanceState]] = {
    "created": InstanceState.PENDING,
    "restarting": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "paused": InstanceState.RUNNING,  # the lease decides whether a frozen node is a member
    "removing": InstanceState.STOPPING,
    "exited": InstanceState.ENDED,
    "dead": InstanceState.ENDED,
}


class DockerProvider:
    """Nodes as containers (`elastic_core.cluster.provider.NodeProvider`).

    Args:
        runs: Directory of all runs' directories, on the engine's machine; a run's own directory is
            mounted at the same path in its containers.
        pool: Image, sizes and mounts.
        grace_s: Time between SIGTERM and SIGKILL of a container's agent.
        follow_logs: Whether to copy what nodes say into the run's directory: one process only.
        client: The engine; by default the one of the environment (`DOCKER_HOST`).
    """

    def __init__(
        self,
        runs: Path,
        pool: DockerPool,
        *,
        grace_s: float = 35.0,
        follow_logs: bool = False,
        client: Any | None = None,
    ) -> None:
        self._runs = runs.absolute()
        self._pool = pool
        self._grace_s = grace_s
        self._client = client if client is not None else engine.connect()
        self._logs = LogFollowers() if follow_logs else None

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Start containers; those that the token made before are returned as they are."""
        with named():
            engine.require_image(self._client, self._pool.image)
            network = engine.network_of(self._client, request.run, self._runs)
            known = self._containers(request.run)
            mine = [c for c in known if c.labels.get(TOKEN_LABEL) == request.token]
            kept = self._kept(request.run)
            ended = [instance for token, instance in kept if token == request.token]
            for container in mine:
                self._start(container)  # its starter may have died between create and start
            numbers = [_number(c.labels[NODE_LABEL]) for c in known]
            numbers += [_number(instance.name) for _, instance in kept]
            missing = request.count - len(mine) - len(ended)
            first = max(numbers, default=0) + 1
            made, reason = self._make(request, range(first, first + missing), network)
        launched = sorted((*ended, *map(self._instance, (*mine, *made))), key=lambda node: _number(node.name))
        return LaunchResult(launched=tuple(launched), shortfall=missing - len(made), reason=reason)

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """Stop containers all at once: SIGTERM, then SIGKILL after the grace."""
        with named():
            chosen = [c for c in self._containers(run) if c.labels.get(NODE_LABEL) in names]
            engine.each(chosen, self._stop)

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return all nodes that were ever launched for a run, by age."""
        with named():
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
        with named():
            containers = engine.containers_of(self._client, run)
            nodes = [container for container in containers if NODE_LABEL in container.labels]
            failed = engine.each(nodes, self._stop)
            if self._logs:
                self._logs.finish(LAST_LINES_S)
                self._logs = LogFollowers()
            for container in nodes:
                if container.name not in failed:
                    self._keep(run, container)
            failed |= engine.each(containers, engine.remove)
            if failed:
                raise engine.SurvivingContainers(failed)
            engine.remove_networks(self._client, run)

    def kill(self, run: RunId, name: str) -> None:
        """End everything of a node at once and without a word, as a power cut would: for demonstrations."""
        with named():
            for container in self._containers(run):
                if container.labels[NODE_LABEL] == name:
                    container.kill()

    # ---- making --------------------------------------------------------------------------------

    def _make(self, request: LaunchRequest, numbers: range, network: str) -> tuple[list[Any], str]:
        """Start new nodes; return those that came to be, and why the others did not.

        Raises:
            InvalidRequest: The engine refused the first one.
            ProviderUnavailable: It gave no answer; what it made nevertheless is found by the token.
        """
        made: list[Any] = []
        for number in numbers:
            try:
                with named():
                    container = self._create(request, f"node-{number}", network)
                    self._start(container)
                    self._follow(container)
            except InvalidRequest as error:
                if not made:
                    raise
                return made, str(error)
            made.append(container)
        return made, ""

    def _create(self, request: LaunchRequest, node: str, network: str) -> Any:
        name = f"elastic-{request.run}-{node}"
        directory = self._runs / request.run
        self._log(request.run, node).parent.mkdir(parents=True, exist_ok=True)
        try:
            return self._client.containers.create(
                self._pool.image,
                ["--name", node, *request.command],
                name=name,
                hostname=node,
                network=network,
                environment={**HOME, **request.environment},
                labels={
                    RUN_LABEL: request.run,
                    NODE_LABEL: node,
                    TOKEN_LABEL: request.token,
                    ROLE_LABEL: NODE,
                    RUNS_LABEL: str(self._runs),
                },
                **engine.confined(),
                **self._limits(),
                mounts=[engine.same_path(directory), *self._given_mounts()],
                user=engine.user_for(directory),
            )
        except APIError as error:
            if error.status_code != engine.CONFLICT:
                raise
            # The reply of an earlier create was lost, or a stranger has the name.
            container = self._client.containers.get(name)
            if container.labels.get(TOKEN_LABEL) == request.token:
                return container
            raise InvalidRequest(
                f"container {name} exists and is not ours: remove it, or give the run another name"
            ) from error

    def _start(self, container: Any) -> None:
        """Start a container that was only made; one that cannot is removed, else it would be awaited."""
        container.reload()
        if container.status == "created":
            try:
                container.start()
            except APIError:
                engine.remove(container)
                raise
            container.reload()

    def _limits(self) -> dict[str, Any]:
        pool = self._pool
        limits: dict[str, Any] = {"shm_size": int(pool.shm_gib * 2**30)}
        if pool.memory_gib:
            limits["mem_limit"] = limits["memswap_limit"] = int(pool.memory_gib * 2**30)
        if pool.cpus:
            limits["nano_cpus"] = int(pool.cpus * 1e9)
        if pool.gpus:
            limits["device_requests"] = [DeviceRequest(count=pool.gpus, capabilities=[["gpu"]])]
        return limits

    def _given_mounts(self) -> list[Mount]:
        return [
            Mount(mount.target, str(Path(mount.source).absolute()), type="bind", read_only=mount.read_only)
            for mount in self._pool.mounts
        ]

    def _stop(self, container: Any) -> None:
        engine.stop(container, self._grace_s)

    # ---- looking -------------------------------------------------------------------------------

    def _containers(self, run: RunId) -> list[Any]:
        containers = engine.containers_of(self._client, run, NODE)
        for container in containers:
            self._follow(container)
        return containers

    def _follow(self, container: Any) -> None:
        if self._logs:
            run, node = container.labels[RUN_LABEL], container.labels[NODE_LABEL]
            self._logs.follow(container, self._log(run, node), self._ends(run) / f"{node}.copied")

    def _log(self, run: str, node: str) -> Path:
        return self._runs / run / "logs" / node / "agent.log"

    def _ends(self, run: str) -> Path:
        return self._runs / run / "containers"

    def _instance(self, container: Any) -> Instance:
        state = container.attrs["State"]
        kind = _STATES.get(state["Status"], InstanceState.PENDING)
        networks = container.attrs["NetworkSettings"]["Networks"].values()
        ended = kind is InstanceState.ENDED
        node = container.labels[NODE_LABEL]
        return Instance(
            name=node,
            state=kind,
            address=next((network["IPAddress"] for network in networks if network["IPAddress"]), ""),
            exit_code=state["ExitCode"] if ended else None,
            detail=_detail(state, container.attrs["HostConfig"]["Memory"]) if ended else "",
            log=str(self._log(container.labels[RUN_LABEL], node)),
        )

    def _kept(self, run: RunId) -> list[tuple[str, Instance]]:
        """Return token and node of every container that was removed."""
        return [
            (path.name.split(".", 1)[1].removesuffix(".json"), decode(Instance, path.read_bytes()))
            for path in self._ends(run).glob("node-*.*.json")
        ]

    def _keep(self, run: RunId, container: Any) -> None:
        container.reload()
        instance = self._instance(container)
        if instance.state is not InstanceState.ENDED:
            instance = replace(instance, state=InstanceState.ENDED, address="", detail="was never started")
        path = self._ends(run) / f"{instance.name}.{container.labels[TOKEN_LABEL]}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".draft")
        draft.write_bytes(encode(instance))
        draft.replace(path)


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
