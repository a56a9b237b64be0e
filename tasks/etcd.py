"""The run's own etcd on this machine: a process that outlives the flow, with its record on disk.

Its data live in the run's directory, one folder an attempt: an attempt must not
see what an earlier one closed, and a restarted server must see all of its own.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from elastic_core.errors import ElasticError
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import EtcdSource
from elastic_core.store.endpoint import parse_endpoints
from elastic_core.store.protocol import Store
from elastic_core.store.server import EtcdOptions, EtcdServer
from tasks.etcd_external import open_store
from tasks.process import ProcessIdentity, end, identify, is_running, with_argument
from tasks.runs import RunDirectory

OWN: Final = EtcdSource()
"""The run's own etcd, which asks for nothing."""


class NoEtcd(ElasticError):
    """The run's etcd is not there."""


class RunningEtcd(Protocol):
    """The etcd of one attempt."""

    @property
    def attempt(self) -> int:
        """Which launch of the run it serves."""
        ...

    @property
    def endpoint(self) -> str:
        """Where the flow reaches it, as `host:port`; the same after a restart."""
        ...

    @property
    def node_endpoint(self) -> str:
        """Where nodes reach it."""
        ...


class EtcdService(Protocol):
    """Where a run's etcd comes from; every method may be repeated, by another process too."""

    @property
    def source(self) -> EtcdSource:
        """What flow and nodes need to get into the recorded server; files have the same paths there."""
        ...

    def record(self) -> RunningEtcd | None:
        """Return the newest attempt's server, whether it runs or not; None if none was started."""
        ...

    def is_running(self) -> bool:
        """Return whether the recorded server runs."""
        ...

    def start(self, attempt: int) -> RunningEtcd:
        """Start an empty server for a new attempt; whatever ran for an earlier one is ended."""
        ...

    def ensure(self) -> RunningEtcd:
        """Return the recorded server, started again with its data and its address if it died.

        Raises:
            NoEtcd: None was ever started.
        """
        ...

    def stop(self) -> None:
        """End the run's servers; their data stay."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdRecord:
    """The etcd of one attempt.

    Attributes:
        endpoint: Where clients reach it, as `host:port`; the same after a restart.
    """

    attempt: int
    endpoint: str
    process: ProcessIdentity

    @property
    def node_endpoint(self) -> str:
        """Where nodes reach it: they are on this machine."""
        return self.endpoint


class EtcdProcess:
    """Starts, adopts and ends the etcd of a run (`EtcdService`)."""

    source: Final = OWN

    def __init__(self, directory: RunDirectory) -> None:
        self._directory = directory

    def record(self) -> EtcdRecord | None:
        """Return the record of the newest attempt's server, whether it runs or not."""
        try:
            return decode(EtcdRecord, self._file.read_bytes())
        except FileNotFoundError:
            return None

    def is_running(self) -> bool:
        """Return whether the recorded server runs."""
        record = self.record()
        return record is not None and is_running(record.process)

    def start(self, attempt: int) -> EtcdRecord:
        """Start an empty server for a new attempt; whatever ran for an earlier one is ended."""
        self.stop()
        discard_data(self._directory)
        return self._run(attempt, port=0)

    def ensure(self) -> EtcdRecord:
        """Return the recorded server, started again with its data and its port if it died.

        Raises:
            NoEtcd: None was ever started.
        """
        record = self.record()
        if record is None:
            raise NoEtcd(f"run {self._directory.run} has no etcd on record")
        if is_running(record.process):
            return record
        return self._run(record.attempt, port=parse_endpoints(record.endpoint)[0].port)

    def stop(self) -> None:
        """End the run's servers; their data stay. May be repeated.

        They are found by their data's place, so that one whose starter died before it could write
        the record is ended too.
        """
        attempts = range(self._directory.attempt() + 1)
        end([found for n in attempts for found in with_argument(str(self._home(n) / "data"))], grace_s=2)

    def _run(self, attempt: int, *, port: int) -> EtcdRecord:
        server = EtcdServer(self._home(attempt), EtcdOptions(port=port))
        server.start()
        process = identify(server.release())
        if process is None:
            raise NoEtcd(f"etcd ended right after its start; see {server.log}")
        record = EtcdRecord(attempt=attempt, endpoint=server.endpoint, process=process)
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(encode(record))
        draft.replace(self._file)
        return record

    @property
    def _file(self) -> Path:
        return self._directory.path / "etcd.json"

    def _home(self, attempt: int) -> Path:
        return self._directory.path.absolute() / f"etcd-{attempt}"


def discard_data(directory: RunDirectory) -> None:
    """Remove what ended servers of a run left: 64 MB each, of no use once the report is written."""
    for data in directory.path.glob("etcd-*/data"):
        shutil.rmtree(data, ignore_errors=True)


@contextmanager
def connected(endpoint: str, source: EtcdSource = OWN) -> Iterator[Store]:
    """Connect to a run's store, and end the connection afterwards."""
    with contextlib.closing(open_store(endpoint, source)) as store:
        yield store
