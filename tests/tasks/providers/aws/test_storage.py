"""The cluster's file system is ready before the first machine is paid for."""

from dataclasses import replace
from typing import Any

import pytest

from elastic_core.errors import InvalidRequest, ProviderUnavailable
from tasks.emulator.frontdoor import Fault
from tasks.providers.aws.inventory import AwsClients, Inventory
from tasks.providers.aws.storage import READY_S, Storage
from tests.tasks.emulator.account import ZONES, Account, account, cloud

__all__ = ["account", "cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow]


def storage(account: Account, **changes: Any) -> Storage:
    base = account.base.model_copy(update=changes)
    inventory = Inventory(base=base, clients=AwsClients.of(account.pool()), wait=lambda _: None)
    return Storage(inventory=inventory, zones=ZONES)


def own(account: Account, *zones: str) -> str:
    """Return a user's file system with mount targets in some zones."""
    efs = account.client("efs")
    made = str(efs.create_file_system(CreationToken="yours")["FileSystemId"])
    for zone in zones:
        efs.create_mount_target(
            FileSystemId=made,
            SubnetId=account.base.subnets[zone],
            SecurityGroups=[account.base.storage_security_group],
        )
    return made


def zones_of(account: Account, file_system: str) -> list[str]:
    targets = account.client("efs").describe_mount_targets(FileSystemId=file_system)["MountTargets"]
    return sorted(target["AvailabilityZoneName"] for target in targets)


def creations(account: Account) -> int:
    return account.cloud.door.calls["POST /2015-02-01/mount-targets"]


@pytest.mark.case("A05")
def test_one_mount_target_a_zone_is_added_where_there_is_none(account: Account) -> None:
    yours = own(account, "us-west-2a")
    before = creations(account)
    for _ in range(2):
        storage(account, file_system=yours).make_ready()
    assert zones_of(account, yours) == ["us-west-2a", "us-west-2b"]
    assert creations(account) - before == 1


@pytest.mark.case("A05")
def test_a_file_system_of_another_network_is_refused_with_its_id(account: Account) -> None:
    yours = own(account, "us-west-2a")
    with pytest.raises(InvalidRequest, match=f"{account.base.vpc}.*vpc-other"):
        storage(account, file_system=yours, vpc="vpc-other").make_ready()


@pytest.mark.case("A06")
def test_a_file_system_that_is_not_available_yet_is_waited_for(account: Account) -> None:
    yours = own(account)
    fault = Fault(
        action="POST /2015-02-01/mount-targets",
        code="IncorrectFileSystemLifeCycleState",
        status=409,
        times=2,
    )
    account.cloud.door.inject(fault)
    storage(account, file_system=yours).make_ready()
    assert len(account.cloud.door.fired) == 2
    assert zones_of(account, yours) == ["us-west-2a", "us-west-2b"]


@pytest.mark.case("A06")
def test_the_wait_ends_and_tells_the_state(account: Account) -> None:
    yours = own(account)
    code = "IncorrectFileSystemLifeCycleState"
    fault = Fault(action="POST /2015-02-01/mount-targets", code=code, status=409, times=999)
    account.cloud.door.inject(fault)
    now = [0.0]
    subject = storage(account, file_system=yours)
    subject.inventory.clock = lambda: now[0]
    subject.inventory.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    with pytest.raises(ProviderUnavailable, match=f"{yours} is still '{code}' after {READY_S:.0f} s"):
        subject.make_ready()


@pytest.mark.case("A20")
def test_a_mount_target_that_lets_no_node_in_is_refused(account: Account) -> None:
    ec2 = account.client("ec2")
    closed = ec2.create_security_group(GroupName="closed", Description="x", VpcId=account.base.vpc)["GroupId"]
    efs = account.client("efs")
    yours = efs.create_file_system(CreationToken="closed")["FileSystemId"]
    efs.create_mount_target(
        FileSystemId=yours, SubnetId=account.base.subnets["us-west-2a"], SecurityGroups=[closed]
    )
    subject = replace(storage(account, file_system=yours), zones=("us-west-2a",))
    node = account.base.node_security_group
    with pytest.raises(InvalidRequest, match=rf"\({closed}\) do not admit NFS \(port 2049\) from {node}"):
        subject.make_ready()
