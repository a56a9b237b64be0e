"""An etcd that somebody else runs, shared by many runs: each has its keys there, and removes them.

Nobody may be under a run's prefix when it begins: two checkouts that number their
runs alike must not drive each other's nodes. Leftovers of the run itself are on
leases, which end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_core.errors import RefusedInput, StoreError
from elastic_core.ids import NO_LEASE
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import DockerPool, EtcdSource, JobSpec
from elastic_core.store.endpoint import PASSWORD_VARIABLE, Access, Credentials, TlsFiles, parse_endpoints
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.keys import RunKeys
from elastic_core.store.preflight import check_endpoint
from elastic_core.store.protocol import Store
from tasks.runs import RunDirectory

LEFTOVERS_S: Final = 15.0
"""Longest wait for the leases of an earlier attempt's nodes and flow: their TTL, and time to spare."""

_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class ExternalEtcdRecord:
    """The etcd of one attempt."""

    attempt: int
    endpoint: str

    @property
    def node_endpoint(self) -> str:
        """Where nodes reach it: at the same addresses."""
        return self.endpoint


class ExternalEtcd:
    """The run's part of an etcd that is not the run's own (`tasks.etcd.EtcdService`)."""

    def __init__(self, directory: RunDirectory, source: EtcdSource) -> None:
        self._directory = directory
        self.source = source
        self._keys = RunKeys(directory.run)

    def record(self) -> ExternalEtcdRecord | None:
        """Return the record of the newest attempt, None if it was ended."""
        try:
            return decode(ExternalEtcdRecord, self._file.read_bytes())
        except FileNotFoundError:
            return None

    def is_running(self) -> bool:
        """Return whether the run has keys there; that it answers is others' care."""
        return self.record() is not None

    def start(self, attempt: int) -> ExternalEtcdRecord:
        """Begin a new attempt without a trace of an earlier one.

        Raises:
            RefusedInput: It does not answer, or somebody else uses the run's name there.
        """
        endpoint = ",".join(map(str, parse_endpoints(self.source.endpoints)))
        check_endpoint(endpoint, tls=tls_of(self.source))
        try:
            with contextlib.closing(open_store(endpoint, self.source)) as store:
                self._await_free(store)
                store.delete(self._keys.prefix, prefix=True)
        except StoreError as error:
            raise RefusedInput([f"etcd.endpoints: {error}"]) from error
        record = ExternalEtcdRecord(attempt=attempt, endpoint=endpoint)
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(encode(record))
        draft.replace(self._file)
        return record

    def ensure(self) -> ExternalEtcdRecord:
        """Return the record; nothing can be started here.

        Raises:
            RefusedInput: No attempt was begun.
        """
        record = self.record()
        if record is None:
            raise RefusedInput([f"run {self._directory.run} has no etcd on record"])
        return record

    def stop(self) -> None:
        """Remove the run's keys; those that cannot be removed now go when the run begins anew."""
        record = self.record()
        if record is None:
            return
        with (
            contextlib.suppress(StoreError),
            contextlib.closing(open_store(record.endpoint, self.source)) as store,
        ):
            store.delete(self._keys.prefix, prefix=True)
        self._file.unlink(missing_ok=True)

    def _await_free(self, store: Store) -> None:
        deadline = time.monotonic() + LEFTOVERS_S
        while living := [
            entry.key for entry in store.read_prefix(self._keys.prefix).entries if entry.lease != NO_LEASE
        ]:
            if time.monotonic() > deadline:
                raise RefusedInput(
                    [
                        f"run {self._directory.run} is in use on the etcd at {self.source.endpoints} "
                        f"({living[0]}): end it there, or give the job another name"
                    ]
                )
            time.sleep(_LOOK_S)

    @property
    def _file(self) -> Path:
        return self._directory.path / "etcd-external.json"


def open_store(endpoint: str, source: EtcdSource) -> EtcdStore:
    """Return a client of a run's etcd, the run's own or an external one."""
    if not source.endpoints:
        return EtcdStore(endpoint)
    return EtcdStore(endpoint, tls=tls_of(source), credentials=credentials_of(source, os.environ))


def tls_of(source: EtcdSource) -> TlsFiles | None:
    """Return how TLS is spoken with an etcd.

    Raises:
        RefusedInput: A file cannot be read.
    """
    tls = source.tls
    if not tls.ca:
        return None
    return TlsFiles(
        ca=Path(tls.ca), cert=Path(tls.cert) if tls.cert else None, key=Path(tls.key) if tls.key else None
    )


def credentials_of(source: EtcdSource, environment: Mapping[str, str]) -> Credentials | None:
    """Return who a run is for an etcd.

    Raises:
        RefusedInput: The user has no password.
    """
    if not source.user:
        return None
    password = environment.get(PASSWORD_VARIABLE, "")
    if source.password_file:
        try:
            password = next(iter(Path(source.password_file).read_text().splitlines()), "")
        except (OSError, UnicodeDecodeError) as error:
            raise RefusedInput(
                [f"etcd.password_file: {source.password_file!r} cannot be read; check path and permissions"]
            ) from error
    if not password:
        raise RefusedInput(
            [f"etcd.user: {source.user!r} has no password; set {PASSWORD_VARIABLE} or etcd.password_file"]
        )
    return Credentials(source.user, password)


def resolve_source(source: EtcdSource) -> EtcdSource:
    """Return the same with absolute paths: nodes have directories of their own."""
    files = {name: _absolute(path) for name, path in source.tls.model_dump().items()}
    return source.model_copy(
        update={
            "tls": source.tls.model_copy(update=files),
            "password_file": _absolute(source.password_file),
        }
    )


def check_source(job: JobSpec) -> None:
    """Refuse an external etcd that the flow or the nodes could not enter.

    Raises:
        RefusedInput: What is wrong and the remedy, one line each.
    """
    source = job.etcd
    if not source.endpoints:
        return
    try:
        endpoints = parse_endpoints(source.endpoints)
        tls = tls_of(source)
        Access(endpoints, tls=tls, credentials=credentials_of(source, os.environ))
        check_endpoint(source.endpoints, tls=tls)
    except RefusedInput as error:
        problems = [p if p.startswith("etcd.") else f"etcd.endpoints: {p}" for p in error.problems]
        raise RefusedInput(problems) from error
    if source.user and not source.password_file and isinstance(job.pool, DockerPool):
        raise RefusedInput(
            [f"etcd.password_file: containers do not see {PASSWORD_VARIABLE}; give the path of a file"]
        )


def agent_flags(source: EtcdSource) -> tuple[str, ...]:
    """Return the agents' flags for an external etcd; the password is none of them."""
    tls = source.tls
    given = {
        "--etcd-ca": tls.ca,
        "--etcd-cert": tls.cert,
        "--etcd-key": tls.key,
        "--etcd-user": source.user,
        "--etcd-password-file": source.password_file,
    }
    return tuple(f"{flag}={value}" for flag, value in given.items() if value)


def files_of(source: EtcdSource) -> tuple[Path, ...]:
    """Return the files that nodes read to enter an external etcd."""
    tls = source.tls
    return tuple(Path(path) for path in (tls.ca, tls.cert, tls.key, source.password_file) if path)


def _absolute(path: str) -> str:
    return str(Path(path).absolute()) if path else ""
