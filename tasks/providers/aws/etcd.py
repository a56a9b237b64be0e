"""The run's own etcd on an on-demand instance, reached over TLS by who carries the run's certificate.

Its data lie on the cluster's file system, and a new instance takes the address of
one that was lost: agents notice a pause and nothing else. Spot would save a cent
an hour and cost the membership; a training node would die with its trainer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from elastic_core.cluster.provider import InstanceState
from elastic_core.errors import InsufficientCapacity, InvalidRequest
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import AwsPool, EtcdSource, EtcdTls
from elastic_core.store.endpoint import DEFAULT_PORT, Endpoint, TlsFiles
from elastic_core.store.server import is_healthy
from tasks.etcd import OWN, NoEtcd
from tasks.etcd_external import tls_of
from tasks.providers.aws import certificates
from tasks.providers.aws.boot import EtcdBoot
from tasks.providers.aws.faults import naming
from tasks.providers.aws.fleet import client_token
from tasks.providers.aws.inventory import Described, Inventory
from tasks.providers.aws.storage import Storage
from tasks.runs import RunDirectory

BOOT_S: Final = 300.0
"""An instance boots, mounts, pulls and answers within this."""

PROFILE_S: Final = 120.0
_UNKNOWN_PROFILE: Final = "Invalid IAM Instance Profile"

ALIVE: Final = frozenset({InstanceState.PENDING, InstanceState.RUNNING})


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdInstanceRecord:
    """The etcd of one attempt.

    Attributes:
        instance: Id of the newest instance that runs it.
        address: Private address, the same for every instance of the attempt.
        home: Directory of data and certificates.
        launches: How many instances the attempt has had.
    """

    attempt: int
    instance: str
    address: str
    zone: str
    home: str
    launches: int = 1

    @property
    def endpoint(self) -> str:
        """Where the flow reaches it: from inside the network, as nodes do."""
        return str(Endpoint(self.address, DEFAULT_PORT))

    @property
    def node_endpoint(self) -> str:
        """Where nodes reach it."""
        return self.endpoint


@dataclass(slots=True, kw_only=True)
class EtcdInstance:
    """Starts, adopts and ends the etcd of a run (`tasks.etcd.EtcdService`).

    Attributes:
        answers: Whether a server answers at an endpoint.
        look_s: A running instance is not asked for more often than this.
    """

    directory: RunDirectory
    pool: AwsPool
    inventory: Inventory
    answers: Callable[[Endpoint, TlsFiles | None], bool] = is_healthy
    look_s: float = 5.0
    _seen_at: float = field(default=float("-inf"), init=False)

    @property
    def source(self) -> EtcdSource:
        """What flow and nodes need to get in: the attempt's certificates, on the file system."""
        record = self.record()
        if record is None:
            return OWN
        tls = certificates.client_files(Path(record.home) / "tls")
        files = EtcdTls(ca=str(tls.ca), cert=str(tls.cert), key=str(tls.key))
        return EtcdSource(endpoints=record.endpoint, tls=files)

    def record(self) -> EtcdInstanceRecord | None:
        """Return the record of the newest attempt's server, whether it runs or not."""
        try:
            return decode(EtcdInstanceRecord, self._file.read_bytes())
        except FileNotFoundError:
            return None

    def is_running(self) -> bool:
        """Return whether the recorded server's instance runs; known for some seconds once it was seen."""
        record = self.record()
        if record is None:
            return False
        if time.monotonic() - self._seen_at < self.look_s:
            return True
        runs = any(item.instance.name == record.instance for item in self._alive())
        if runs:
            self._seen_at = time.monotonic()
        return runs

    def start(self, attempt: int) -> EtcdInstanceRecord:
        """Start an empty server for a new attempt; whatever ran for an earlier one is ended."""
        self.stop()
        Storage(inventory=self.inventory, zones=self._zones()).make_ready()
        home = self.directory.path.absolute() / f"etcd-{attempt}"
        home.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = self._launch(home, f"etcd-{attempt}-1", self._zones())
        certificates.issue(home / "tls", address=found.instance.address, lifetime=self._lifetime)
        record = EtcdInstanceRecord(
            attempt=attempt,
            instance=found.instance.name,
            address=found.instance.address,
            zone=found.zone,
            home=str(home),
        )
        self._note(record)
        self._await_answer(record)
        return record

    def ensure(self) -> EtcdInstanceRecord:
        """Return the recorded server; one whose instance is gone gets another, at the same address.

        Raises:
            NoEtcd: None was ever started, or it does not answer.
        """
        record = self.record()
        if record is None:
            raise NoEtcd(f"run {self.directory.run} has no etcd on record")
        if self.is_running():
            return record
        # An instance that a lost flow launched, and did not live to note, holds the address.
        self.inventory.end_all(self.directory.run, "etcd")
        number = record.launches + 1
        token = f"etcd-{record.attempt}-{number}"
        found = self._launch(Path(record.home), token, [record.zone], address=record.address)
        again = EtcdInstanceRecord(
            attempt=record.attempt,
            instance=found.instance.name,
            address=record.address,
            zone=record.zone,
            home=record.home,
            launches=number,
        )
        self._note(again)
        self._await_answer(again)
        return again

    def stop(self) -> None:
        """End the run's servers; their data stay. May be repeated."""
        self._seen_at = float("-inf")
        self.inventory.end_all(self.directory.run, "etcd")

    # ---- launching -----------------------------------------------------------------------------

    def _zones(self) -> list[str]:
        return list(self.pool.zones or self.inventory.base.subnets)

    def _launch(self, home: Path, token: str, zones: Sequence[str], *, address: str = "") -> Described:
        """Launch one on-demand instance, in the first zone that has one."""
        problems = []
        for zone in zones:
            try:
                return self._order(home, token, zone, address)
            except InsufficientCapacity as error:
                problems.append(str(error))
        raise InsufficientCapacity(f"no machine for etcd: {'; '.join(problems)}")

    def _order(self, home: Path, token: str, zone: str, address: str) -> Described:
        base, run = self.inventory.base, self.directory.run
        boot = EtcdBoot(
            base=base,
            image=self.pool.image or f"{base.repository_url}:latest",
            mount=self.pool.mount,
            max_minutes=int(self.pool.max_hours * 60),
            home=home,
        )
        tags = self.inventory.tags(run, "etcd", token, self.pool.max_hours)
        pairs = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
        order: dict[str, Any] = {
            "MinCount": 1,
            "MaxCount": 1,
            "LaunchTemplate": {"LaunchTemplateId": base.launch_template, "Version": "1"},
            "InstanceType": self.pool.etcd_instance_type,
            "SubnetId": base.subnets[zone],
            "SecurityGroupIds": [base.etcd_security_group],
            "UserData": boot.script(),
            "TagSpecifications": [{"ResourceType": kind, "Tags": pairs} for kind in ("instance", "volume")],
            **({"PrivateIpAddress": address} if address else {}),
        }
        order["ClientToken"] = client_token(f"{run}/{token}", order)
        return self._run(order)

    def _run(self, order: dict[str, Any]) -> Described:
        """Launch; a fresh instance profile is unknown to EC2 until IAM has told it everywhere."""
        deadline = self.inventory.clock() + PROFILE_S
        while True:
            try:
                with naming("RunInstances"):
                    answer = self.inventory.clients.ec2.run_instances(**order)
            except InvalidRequest as error:
                if _UNKNOWN_PROFILE not in str(error) or self.inventory.clock() > deadline:
                    raise
                self.inventory.wait(5.0)
            else:
                return self.inventory.read(answer["Instances"][0])

    # ---- looking -------------------------------------------------------------------------------

    def _alive(self) -> list[Described]:
        found = self.inventory.described(self.directory.run, "etcd")
        return [item for item in found if item.instance.state in ALIVE]

    def _await_answer(self, record: EtcdInstanceRecord) -> None:
        deadline = time.monotonic() + BOOT_S
        endpoint = Endpoint(record.address, DEFAULT_PORT)
        looked = time.monotonic()
        tls = tls_of(self.source)
        while not self.answers(endpoint, tls):
            now = time.monotonic()
            if now - looked >= self.look_s:
                looked = now
                self._refuse_ended(record)
            if now > deadline:
                raise NoEtcd(
                    f"etcd on {record.instance} did not answer at {endpoint} within {BOOT_S:.0f} s: the flow "
                    f"must run in the cluster's network and carry security group "
                    f"{self.inventory.base.node_security_group}; what etcd said: {record.home}/etcd.log"
                )
            self.inventory.wait(0.5)
        self._seen_at = time.monotonic()

    def _refuse_ended(self, record: EtcdInstanceRecord) -> None:
        for item in self.inventory.described(self.directory.run, "etcd"):
            if item.instance.name == record.instance and item.instance.state is InstanceState.ENDED:
                raise NoEtcd(f"etcd's instance {record.instance} ended: {item.instance.detail}")

    @property
    def _lifetime(self) -> timedelta:
        return timedelta(hours=self.pool.max_hours + 1)

    @property
    def _file(self) -> Path:
        return self.directory.path / "etcd-instance.json"

    def _note(self, record: EtcdInstanceRecord) -> None:
        draft = self._file.with_suffix(".draft")
        draft.write_bytes(encode(record))
        draft.replace(self._file)
