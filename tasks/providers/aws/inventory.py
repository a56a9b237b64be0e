"""Instances of one cluster as EC2 tells them: found by tag, ended by id.

`DescribeInstances` by tag is the truth. Tags are part of every create call; nothing is tagged
afterwards, so that whatever exists can be found, and ended, by somebody who knows only the cluster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import boto3

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.errors import ProviderError, ProviderUnavailable
from elastic_core.ids import RunId
from elastic_core.model.job import AwsPool
from tasks.providers.aws.base import Base
from tasks.providers.aws.faults import CLIENT_CONFIG, naming

CLUSTER_TAG: Final = "elastic:cluster"
RUN_TAG: Final = "elastic:run"
TOKEN_TAG: Final = "elastic:token"  # noqa: S105 (a tag)
ROLE_TAG: Final = "elastic:role"
EXPIRES_TAG: Final = "elastic:expires-at"

Role = Literal["node", "etcd"]

END_S: Final = 300.0
"""An instance that was told to end has ended within this, or a person should know."""

_LONGEST_PAUSE_S: Final = 5.0
_BATCH: Final = 500

_STATES: Final[Mapping[str, InstanceState]] = {
    "pending": InstanceState.PENDING,
    "running": InstanceState.RUNNING,
    "shutting-down": InstanceState.STOPPING,
    "stopping": InstanceState.STOPPING,
    "stopped": InstanceState.ENDED,
    "terminated": InstanceState.ENDED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AwsClients:
    """The services of one region; the emulator's where the pool names an endpoint."""

    ec2: Any
    sqs: Any
    efs: Any

    @classmethod
    def of(cls, pool: AwsPool) -> AwsClients:
        """Return clients for the pool's region, whatever the environment's default region is."""
        session = boto3.session.Session(region_name=pool.region)
        endpoint = pool.endpoint_url or None

        def client(service: str) -> Any:
            return session.client(service, config=CLIENT_CONFIG, endpoint_url=endpoint)

        return cls(ec2=client("ec2"), sqs=client("sqs"), efs=client("efs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """An instance with what its tags and its place say.

    Attributes:
        token: Of the launch that made it.
        at: When it was launched, in seconds since the epoch.
        spot: Whether EC2 may take it away.
    """

    instance: Instance
    token: str
    at: float
    zone: str
    kind: str = ""
    spot: bool = False


@dataclass(slots=True, kw_only=True)
class Inventory:
    """The instances of a cluster.

    Attributes:
        clock: Wall-clock seconds.
        wait: Sleeps; a test moves its own clock.
    """

    base: Base
    clients: AwsClients
    clock: Callable[[], float] = time.time
    wait: Callable[[float], None] = time.sleep

    def described(self, run: RunId, role: Role) -> Iterator[Described]:
        """Yield a run's instances, ended ones for about an hour."""
        filters = [
            {"Name": f"tag:{CLUSTER_TAG}", "Values": [self.base.cluster]},
            {"Name": f"tag:{RUN_TAG}", "Values": [run]},
            {"Name": f"tag:{ROLE_TAG}", "Values": [role]},
        ]
        with naming("DescribeInstances"):
            for page in self.clients.ec2.get_paginator("describe_instances").paginate(Filters=filters):
                for reservation in page["Reservations"]:
                    for instance in reservation["Instances"]:
                        yield self.read(instance)

    def read(self, instance: Mapping[str, Any]) -> Described:
        """Return an instance of EC2's answer as ours."""
        state = _STATES[instance["State"]["Name"]]
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        reason = instance.get("StateReason", {}).get("Message", "") if state is InstanceState.ENDED else ""
        return Described(
            instance=Instance(
                name=instance["InstanceId"],
                state=state,
                address=instance.get("PrivateIpAddress", ""),
                detail=reason,
                log=f"{self.base.log_group}:{instance['InstanceId']}",
            ),
            token=tags.get(TOKEN_TAG, ""),
            at=instance["LaunchTime"].timestamp(),
            zone=instance["Placement"]["AvailabilityZone"],
            kind=instance.get("InstanceType", ""),
            spot=instance.get("InstanceLifecycle") == "spot",
        )

    def tags(self, run: RunId, role: Role, token: str, hours: float) -> dict[str, str]:
        """Return the tags of something that is launched now and ends itself after so many hours."""
        expires = datetime.fromtimestamp(self.clock() + hours * 3600, UTC)
        return {
            "Name": f"{self.base.cluster}-{run}" + ("-etcd" if role == "etcd" else ""),
            CLUSTER_TAG: self.base.cluster,
            RUN_TAG: run,
            TOKEN_TAG: token,
            ROLE_TAG: role,
            # To the hour, so that a repeated call has the same arguments and its token still holds.
            EXPIRES_TAG: expires.strftime("%Y-%m-%dT%H:00Z"),
        }

    def terminate(self, names: Sequence[str]) -> None:
        """Tell instances to end.

        Raises:
            ProviderError: Why a batch was not taken; every batch was tried.
        """
        if failed := terminate(self.clients.ec2, names):
            raise next(iter(failed.values()))

    def end_all(self, run: RunId, role: Role) -> None:
        """End a run's instances of one role, and wait for their end; a call that fails is made again.

        Raises:
            ProviderError: Some still run; the message names them, and says why the last call failed.
        """
        deadline = self.clock() + END_S
        pause = 1.0
        while left := self._left(run, role):
            failed = terminate(
                self.clients.ec2, [node.name for node in left if node.state is not InstanceState.STOPPING]
            )
            names = ", ".join(node.name for node in left)
            for error in failed.values():
                if not isinstance(error, ProviderUnavailable):  # asked again it says the same
                    raise type(error)(f"{error} Not terminated: {', '.join(failed)}") from error
            if self.clock() > deadline:
                why = "".join(f" ({error})" for error in list(failed.values())[:1])
                raise ProviderUnavailable(f"still not terminated after {END_S:.0f} s{why}: {names}")
            self.wait(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _left(self, run: RunId, role: Role) -> list[Instance]:
        return [
            item.instance
            for item in self.described(run, role)
            if item.instance.state is not InstanceState.ENDED
        ]


def terminate(ec2: Any, names: Sequence[str]) -> dict[str, ProviderError]:
    """Tell instances to end, batch after batch; return why for those whose batch was not taken."""
    failed: dict[str, ProviderError] = {}
    for start in range(0, len(names), _BATCH):
        batch = names[start : start + _BATCH]
        try:
            with naming("TerminateInstances"):
                ec2.terminate_instances(InstanceIds=list(batch))
        except ProviderError as error:
            failed |= dict.fromkeys(batch, error)
    return failed
