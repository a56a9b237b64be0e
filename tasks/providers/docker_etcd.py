"""The run's own etcd as a container, for nodes that are containers: reached by name on their network.

Its data lie in the run's directory, as those of a local run do: a container that
was killed, or removed by somebody, comes back with them and on the same port.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from docker.errors import APIError, NotFound
from docker.types import EndpointConfig

from elastic_core.errors import ProviderUnavailable
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import DockerPool
from elastic_core.store.endpoint import DEFAULT_PORT, Endpoint
from elastic_core.store.server import EtcdOptions, free_port, is_healthy, last_words, upkeep_flags
from tasks.etcd import OWN, NoEtcd
from tasks.providers import docker_engine as engine
from tasks.providers.docker_engine import ROLE_LABEL, RUN_LABEL, RUNS_LABEL, named
from tasks.runs import RunDirectory

ETCD: Final = "etcd"
"""Role of the container, and its name on the run's network."""

LOOPBACK: Final = "127.0.0.1"
START_S: Final = 20.0

_PORT_ATTEMPTS: Final = 5
_POLL_S: Final = 0.05
_LAST_LINES: Final = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdContainerRecord:
    """The etcd of one attempt.

    Attributes:
        port: On loopback of the engine's machine; the same after a restart.
    """

    attempt: int
    port: int

    @property
    def endpoint(self) -> str:
        """Where the flow reaches it."""
        return str(Endpoint(LOOPBACK, self.port))

    @property
    def node_endpoint(self) -> str:
        """Where nodes reach it."""
        return str(Endpoint(ETCD, DEFAULT_PORT))


class EtcdContainer:
    """Starts, adopts and ends the etcd of a run (`tasks.etcd.EtcdService`)."""

    source: Final = OWN

    def __init__(self, directory: RunDirectory, pool: DockerPool, *, client: Any | None = None) -> None:
        self._directory = directory
        self._pool = pool
        self._client = client if client is not None else engine.connect()

    def record(self) -> EtcdContainerRecord | None:
        """Return the record of the newest attempt's server, whether it runs or not."""
        try:
            return decode(EtcdContainerRecord, self._file.read_bytes())
        except FileNotFoundError:
            return None

    def is_running(self) -> bool:
        """Return whether the recorded server runs."""
        with named():
            try:
                status = self._client.containers.get(self._name).status
            except NotFound:
                return False
        return self.record() is not None and status == "running"

    def start(self, attempt: int) -> EtcdContainerRecord:
        """Start an empty server for a new attempt; whatever ran for an earlier one is ended."""
        self.stop()
        with named():
            engine.require_image(self._client, self._pool.image)
            for _ in range(_PORT_ATTEMPTS - 1):
                record = EtcdContainerRecord(attempt=attempt, port=free_port(LOOPBACK))
                try:
                    return self._run(record)
                except _PortTaken:
                    self.stop()
            return self._run(EtcdContainerRecord(attempt=attempt, port=free_port(LOOPBACK)))

    def ensure(self) -> EtcdContainerRecord:
        """Return the recorded server, started again with its data and its port if it died.

        Raises:
            NoEtcd: None was ever started.
        """
        record = self.record()
        if record is None:
            raise NoEtcd(f"run {self._directory.run} has no etcd on record")
        if self.is_running():
            return record
        self.stop()
        with named():
            return self._run(record)

    def stop(self) -> None:
        """Remove the run's servers; their data stay. May be repeated.

        They are found by label, so that one whose starter died before it could write the record is
        removed too.
        """
        with named():
            for container in engine.containers_of(self._client, self._directory.run, ETCD):
                engine.remove(container)  # by force: etcd's data are safe at any moment

    def _run(self, record: EtcdContainerRecord) -> EtcdContainerRecord:
        container = self._create(record)
        try:
            container.start()
        except APIError as error:
            if "port is already allocated" in str(error) or "address already in use" in str(error):
                raise _PortTaken(f"port {record.port} on {LOOPBACK} was taken meanwhile") from error
            raise
        self._await_answer(container, record)
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(encode(record))
        draft.replace(self._file)
        return record

    def _create(self, record: EtcdContainerRecord) -> Any:
        home = self._directory.path.absolute() / f"etcd-{record.attempt}"
        (home / "data").mkdir(parents=True, exist_ok=True, mode=0o700)  # etcd insists on the mode
        runs = self._directory.path.absolute().parent
        network = engine.network_of(self._client, self._directory.run, runs)
        return self._client.containers.create(
            self._pool.image,
            _flags(home),
            entrypoint=["etcd"],
            name=self._name,
            hostname=ETCD,
            network=network,
            networking_config={network: EndpointConfig(self._client.api.api_version, aliases=[ETCD])},
            ports={f"{DEFAULT_PORT}/tcp": (LOOPBACK, record.port)},
            labels={RUN_LABEL: self._directory.run, ROLE_LABEL: ETCD, RUNS_LABEL: str(runs)},
            healthcheck={"test": ["NONE"]},  # the image's own is the agent's
            mounts=[engine.same_path(home)],
            user=engine.user_for(home),
            **engine.confined(),
        )

    def _await_answer(self, container: Any, record: EtcdContainerRecord) -> None:
        deadline = time.monotonic() + START_S
        while not is_healthy(Endpoint(LOOPBACK, record.port)):
            container.reload()
            if container.status not in ("created", "running"):
                said = last_words(container.logs(tail=_LAST_LINES).decode(errors="replace"))
                raise NoEtcd(f"etcd ended right after its start: {said}")
            if time.monotonic() > deadline:
                raise NoEtcd(f"etcd did not answer within {START_S:.0f} s: see `docker logs {self._name}`")
            time.sleep(_POLL_S)

    @property
    def _name(self) -> str:
        return f"elastic-{self._directory.run}-{ETCD}"

    @property
    def _file(self) -> Path:
        return self._directory.path / "etcd-container.json"


class _PortTaken(ProviderUnavailable):
    """Another process bound the port between our look and the engine's."""


def _flags(home: Path) -> list[str]:
    peers = f"http://{LOOPBACK}:{DEFAULT_PORT + 1}"
    return [
        *("--name", "elastic", "--data-dir", str(home / "data")),
        *("--listen-client-urls", f"http://0.0.0.0:{DEFAULT_PORT}"),
        *("--advertise-client-urls", f"http://{ETCD}:{DEFAULT_PORT}"),
        *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
        *("--initial-cluster", f"elastic={peers}"),
        "--logger=zap",  # etcd 3.4 writes to one place only by its default
        *("--log-outputs", f"stderr,{home / 'etcd.log'}"),
        *upkeep_flags(EtcdOptions()),
    ]
