"""The run's etcd on an instance of its own, on the emulated account."""

import base64
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic_core.errors import InsufficientCapacity, InvalidRequest
from elastic_core.model.job import JobSpec
from tasks.emulator.frontdoor import Fault
from tasks.etcd import NoEtcd
from tasks.providers.aws.etcd import EtcdInstance
from tasks.providers.aws.inventory import AwsClients, Inventory
from tasks.runs import RunDirectory
from tests.tasks.emulator.account import Account, account, cloud

__all__ = ["account", "cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    made = RunDirectory(tmp_path / "digits-1")
    made.path.mkdir()
    made.begin_attempt(JobSpec(), now=0.0)
    return made


def service(account: Account, directory: RunDirectory, **changes: Any) -> EtcdInstance:
    pool = account.pool(mount=str(directory.path.parent), image="image", **changes)
    inventory = Inventory(base=account.base, clients=AwsClients.of(pool), wait=lambda _: None)
    return EtcdInstance(
        directory=directory, pool=pool, inventory=inventory, answers=lambda endpoint, tls: tls is not None
    )


def test_it_runs_on_demand_in_its_own_group_and_is_found_by_tag(
    account: Account, directory: RunDirectory
) -> None:
    record = service(account, directory).start(1)
    instance = account.cloud.instance(record.instance)
    tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
    assert instance.lifecycle is None
    assert instance.instance_type == "t3.small"
    assert [group.id for group in instance.security_groups] == [account.base.etcd_security_group]
    assert (tags["elastic:run"], tags["elastic:role"]) == ("digits-1", "etcd")
    assert record.endpoint == f"{instance.private_ip}:2379"


def test_user_data_hold_paths_and_no_secret(account: Account, directory: RunDirectory) -> None:
    record = service(account, directory).start(1)
    script = base64.b64decode(str(account.cloud.instance(record.instance).user_data)).decode()
    key = Path(record.home, "tls", "server.key").read_text().splitlines()[1]
    assert key not in script
    assert f"--key-file={record.home}/tls/server.key" in script
    assert "--client-cert-auth" in script


def test_another_process_adopts_it(account: Account, directory: RunDirectory) -> None:
    started = service(account, directory).start(1)
    other = service(account, directory)
    assert other.is_running()
    assert other.ensure() == started
    assert len(account.living()) == 1


def test_a_lost_instance_is_replaced_at_its_address_with_its_data(
    account: Account, directory: RunDirectory
) -> None:
    subject = service(account, directory)
    first = subject.start(1)
    account.cloud.ended(first.instance, "Server.InternalError: the host failed")
    again = service(account, directory).ensure()
    assert again == replace(first, instance=again.instance, launches=2)
    assert again.instance != first.instance
    assert account.cloud.instance(again.instance).private_ip == first.address


@pytest.mark.case("P07")
def test_a_new_attempt_ends_the_server_of_the_one_before(account: Account, directory: RunDirectory) -> None:
    first = service(account, directory).start(1)
    second = service(account, directory).start(2)
    assert account.living() == [second.instance]
    assert second.home != first.home


@pytest.mark.case("A11")
def test_a_lost_reply_makes_no_second_server(account: Account, directory: RunDirectory) -> None:
    account.cloud.door.inject(Fault(action="RunInstances", lose_reply=True))
    service(account, directory).start(1)
    assert len(account.cloud.door.fired) == 1
    assert len(account.living()) == 1


def test_without_capacity_the_next_zone_is_asked_and_all_reasons_are_told(
    account: Account, directory: RunDirectory
) -> None:
    fault = Fault(action="RunInstances", code="InsufficientInstanceCapacity", message="none")
    account.cloud.door.inject(fault)
    assert service(account, directory).start(1).zone == "us-west-2b"
    account.cloud.door.inject(replace(fault, times=2))
    with pytest.raises(InsufficientCapacity, match=r"none.*none"):
        service(account, directory).start(2)


def test_a_refused_launch_leaves_nothing(account: Account, directory: RunDirectory) -> None:
    account.cloud.door.inject(Fault(action="RunInstances", code="UnauthorizedOperation", status=403))
    with pytest.raises(InvalidRequest, match="controller policy"):
        service(account, directory).start(1)
    assert account.living() == []


UNKNOWN_PROFILE = Fault(
    action="RunInstances",
    code="InvalidParameterValue",
    message="Value (demo-node) for parameter iamInstanceProfile.name is invalid. "
    "Invalid IAM Instance Profile name",
    times=3,
)


@pytest.mark.case("A10")
def test_a_fresh_instance_profile_is_waited_for(account: Account, directory: RunDirectory) -> None:
    account.cloud.door.inject(UNKNOWN_PROFILE)
    service(account, directory).start(1)
    assert len(account.cloud.door.fired) == 3
    assert len(account.living()) == 1


@pytest.mark.case("A10")
@pytest.mark.parametrize(
    ("message", "calls"), [(UNKNOWN_PROFILE.message, 26), ("Invalid value for parameter InstanceType", 1)]
)
def test_a_bad_one_is_told_after_two_minutes_and_any_other_mistake_at_once(
    account: Account, directory: RunDirectory, message: str, calls: int
) -> None:
    account.cloud.door.inject(replace(UNKNOWN_PROFILE, message=message, times=999))
    subject = service(account, directory)
    now = [0.0]
    subject.inventory.clock = lambda: now[0]
    subject.inventory.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    with pytest.raises(InvalidRequest, match=message.split("(")[0]):
        subject.start(1)
    assert account.cloud.door.calls["RunInstances"] == calls
    assert account.living() == []


def test_one_that_ends_while_it_boots_is_told_with_its_reason(
    account: Account, directory: RunDirectory
) -> None:
    subject = service(account, directory)

    def never(*_: object) -> bool:
        for name in account.living():
            account.cloud.ended(name, "Client.InstanceInitiatedShutdown: Instance initiated shutdown")
        return False

    subject.answers = never
    subject.look_s = 0.0
    with pytest.raises(NoEtcd, match="Instance initiated shutdown"):
        subject.start(1)


def test_stop_may_be_repeated_and_ends_what_was_never_noted(
    account: Account, directory: RunDirectory
) -> None:
    service(account, directory).start(1)
    (directory.path / "etcd-instance.json").unlink()
    for _ in range(2):
        service(account, directory).stop()
    assert account.living() == []
    with pytest.raises(NoEtcd):
        service(account, directory).ensure()
