"""The cluster's file system, made ready for a run's machines before the first of them is paid for.

Terraform makes it, or the user gives one. One that is given may lack a mount
target in a zone: that is added, and stays, for it costs nothing. A file system is
never changed otherwise, and never deleted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from botocore.exceptions import ClientError

from elastic_core.errors import InvalidRequest, ProviderUnavailable
from tasks.providers.aws.faults import code_of, naming
from tasks.providers.aws.inventory import Inventory

NFS_PORT: Final = 2049
READY_S: Final = 300.0
_POLL_S: Final = 5.0

_NOT_YET: Final = "IncorrectFileSystemLifeCycleState"
_THERE_ALREADY: Final = "MountTargetConflict"


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """The file system of one cluster.

    Attributes:
        zones: Where machines may be launched.
    """

    inventory: Inventory
    zones: Sequence[str]

    def make_ready(self) -> None:
        """Return when machines of every zone can mount it.

        Raises:
            InvalidRequest: It belongs to another network, or its security groups keep machines out.
            ProviderUnavailable: It was not ready in time; the message has its state.
        """
        deadline = self.inventory.clock() + READY_S
        self._await_available(deadline)
        targets = self._targets()
        self._refuse_foreign(targets)
        there = {target["AvailabilityZoneName"] for target in targets}
        for zone in self.zones:
            if zone not in there:
                self._add_target(zone, deadline)
        while waiting := [target for target in self._targets() if target["LifeCycleState"] != "available"]:
            self._pause(deadline, f"mount target {waiting[0]['MountTargetId']}", waiting[0]["LifeCycleState"])
        for target in self._targets():
            if target["AvailabilityZoneName"] in self.zones:
                self._refuse_closed(target)

    @property
    def _file_system(self) -> str:
        return self.inventory.base.file_system

    def _await_available(self, deadline: float) -> None:
        while True:
            with naming("DescribeFileSystems"):
                found = self.inventory.clients.efs.describe_file_systems(FileSystemId=self._file_system)
            state = found["FileSystems"][0]["LifeCycleState"]
            if state == "available":
                return
            self._pause(deadline, f"file system {self._file_system}", state)

    def _targets(self) -> list[Mapping[str, Any]]:
        with naming("DescribeMountTargets"):
            found = self.inventory.clients.efs.describe_mount_targets(FileSystemId=self._file_system)
        targets: list[Mapping[str, Any]] = found["MountTargets"]
        return targets

    def _refuse_foreign(self, targets: Sequence[Mapping[str, Any]]) -> None:
        ours = self.inventory.base.vpc
        for target in targets:
            if target.get("VpcId", ours) != ours:
                raise InvalidRequest(
                    f"file system {self._file_system}: mount target {target['MountTargetId']} is in network "
                    f"{target['VpcId']}, and the cluster's is {ours}: a file system can be mounted in one "
                    "network only, so give another one to Terraform"
                )

    def _add_target(self, zone: str, deadline: float) -> None:
        base = self.inventory.base
        while True:
            try:
                self.inventory.clients.efs.create_mount_target(
                    FileSystemId=self._file_system,
                    SubnetId=base.subnets[zone],
                    SecurityGroups=[base.storage_security_group],
                )
            except ClientError as error:
                if code_of(error) == _THERE_ALREADY:
                    return
                if code_of(error) != _NOT_YET:
                    with naming("CreateMountTarget"):
                        raise
                self._pause(deadline, f"file system {self._file_system}", code_of(error))
            else:
                return

    def _refuse_closed(self, target: Mapping[str, Any]) -> None:
        base, name = self.inventory.base, target["MountTargetId"]
        with naming("DescribeMountTargetSecurityGroups"):
            groups = self.inventory.clients.efs.describe_mount_target_security_groups(MountTargetId=name)[
                "SecurityGroups"
            ]
        admitted = self._admitted(groups)
        for client in (base.node_security_group, base.etcd_security_group):
            if client not in admitted:
                raise InvalidRequest(
                    f"file system {self._file_system}: the security groups of its mount target {name} "
                    f"({', '.join(groups)}) do not admit NFS (port {NFS_PORT}) from {client}: add that rule"
                )

    def _admitted(self, groups: Collection[str]) -> set[str]:
        """Return the security groups that may reach a mount target with these groups."""
        filters = [{"Name": "group-id", "Values": list(groups)}]
        with naming("DescribeSecurityGroupRules"):
            pages = self.inventory.clients.ec2.get_paginator("describe_security_group_rules").paginate(
                Filters=filters
            )
            rules = [rule for page in pages for rule in page["SecurityGroupRules"]]
        return {
            rule.get("ReferencedGroupInfo", {}).get("GroupId", "")
            for rule in rules
            if not rule["IsEgress"] and _covers_nfs(rule)
        }

    def _pause(self, deadline: float, what: str, state: str) -> None:
        if self.inventory.clock() > deadline:
            raise ProviderUnavailable(f"{what} is still {state!r} after {READY_S:.0f} s: try again later")
        self.inventory.wait(_POLL_S)


def _covers_nfs(rule: Mapping[str, Any]) -> bool:
    if rule["IpProtocol"] == "-1":
        return True
    return bool(rule["IpProtocol"] == "tcp" and rule["FromPort"] <= NFS_PORT <= rule["ToPort"])
