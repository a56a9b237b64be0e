"""EC2 nodes on the emulated account, with errors injected."""

import base64
import json
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from elastic_core.cluster.provider import InstanceState, LaunchRequest
from elastic_core.errors import InsufficientCapacity, InvalidRequest, ProviderUnavailable, QuotaExceeded
from elastic_core.ids import RunId
from elastic_core.model.job import JobSpec
from tasks.emulator.frontdoor import Fault
from tasks.providers.aws.fleet import BLOCK_S, Pool
from tasks.providers.aws.inventory import AwsClients, Inventory
from tasks.providers.aws.provider import AwsProvider
from tasks.runs import RunDirectory
from tests.tasks.emulator.account import Account, account, cloud
from tests.tasks.providers.aws.test_etcd import service

__all__ = ["account", "cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow]

RUN = RunId("digits-1")
TYPES = ("m5.large", "c5.large")


@pytest.fixture(autouse=True)
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def provider(account: Account, **changes: Any) -> AwsProvider:
    pool = account.pool(**{"instance_types": TYPES, **changes})
    inventory = Inventory(base=account.base, clients=AwsClients.of(pool), wait=lambda _: None)
    return AwsProvider(pool=pool, inventory=inventory, runs=Path("runs"))


def wanted(count: int = 1, token: str = "start", run: RunId = RUN) -> LaunchRequest:
    return LaunchRequest(
        run=run, token=token, count=count, command=("--rdzv-id", run, "a b", "$HOME", "50%d", "")
    )


def etcd(account: Account, runs: Path) -> str:
    """Start the run's etcd; return its instance."""
    directory = RunDirectory(runs / RUN)
    directory.path.mkdir()
    directory.begin_attempt(JobSpec(), now=0.0)
    return service(account, directory).start(1).instance


def exhaust(account: Account, zone: str, market: Any = "spot") -> None:
    for kind in TYPES:
        account.cloud.market.limit(Pool(kind, zone, market), 0)


def zone_of(account: Account, name: str) -> str:
    return str(account.cloud.instance(name).availability_zone)


@pytest.mark.case("A02")
def test_nodes_are_spot_tagged_and_listed(account: Account) -> None:
    made = provider(account).launch(wanted(2))
    (names, shortfall) = ([node.name for node in made.launched], made.shortfall)
    assert (len(names), shortfall) == (2, 0)
    listed = provider(account).list_nodes(RUN)
    assert sorted(node.name for node in listed) == sorted(names)
    for name in names:
        instance = account.cloud.instance(name)
        tags = {tag["key"]: tag["value"] for tag in instance.get_tags()}
        assert instance.lifecycle == "spot"
        assert tags["elastic:run"] == RUN
        assert tags["elastic:cluster"] == "demo"
    volumes = account.client("ec2").describe_volumes()["Volumes"]
    assert all("elastic:run" in {tag["Key"] for tag in volume["Tags"]} for volume in volumes)


@pytest.mark.case("A16")
def test_nothing_is_made_in_the_environments_default_region(account: Account) -> None:
    provider(account).launch(wanted())
    assert account.client("ec2", "us-east-1").describe_instances()["Reservations"] == []


@pytest.mark.case("A11")
def test_a_lost_reply_makes_no_twins(account: Account) -> None:
    account.cloud.door.inject(Fault(action="CreateFleet", lose_reply=True))
    made = provider(account).launch(wanted(2))
    assert len(made.launched) == 2
    assert len(account.living()) == 2
    assert len(account.cloud.door.fired) == 1


def test_a_launch_that_died_is_adopted_by_the_next_process(account: Account) -> None:
    first = provider(account).launch(wanted(2))
    again = provider(account).launch(wanted(2))
    assert {node.name for node in again.launched} == {node.name for node in first.launched}
    assert len(account.living()) == 2


def test_without_capacity_the_next_zone_is_asked(account: Account) -> None:
    exhaust(account, "us-west-2a")
    made = provider(account).launch(wanted(2))
    assert {zone_of(account, node.name) for node in made.launched} == {"us-west-2b"}


def test_nodes_of_a_run_stay_in_its_zone(account: Account) -> None:
    subject = provider(account)
    subject.launch(wanted(1))
    exhaust(account, "us-west-2a")
    with pytest.raises(InsufficientCapacity, match="sufficient"):
        subject.launch(wanted(1, "more"))
    assert len(account.living()) == 1


def test_partial_capacity_is_data(account: Account) -> None:
    exhaust(account, "us-west-2b")
    account.cloud.market.limit(Pool("m5.large", "us-west-2a", "spot"), 1)
    account.cloud.market.limit(Pool("c5.large", "us-west-2a", "spot"), 0)
    made = provider(account).launch(wanted(3))
    assert (len(made.launched), made.shortfall) == (1, 2)
    assert "InsufficientInstanceCapacity" in made.reason


def test_on_demand_is_the_declared_last_resort(account: Account) -> None:
    exhaust(account, "us-west-2a")
    exhaust(account, "us-west-2b")
    with pytest.raises(InsufficientCapacity):
        provider(account).launch(wanted())
    made = provider(account, market="spot-then-on-demand").launch(wanted(1, "again"))
    assert account.cloud.instance(made.launched[0].name).lifecycle is None


def test_a_pool_without_capacity_is_left_alone_for_a_while(account: Account) -> None:
    exhaust(account, "us-west-2a")
    exhaust(account, "us-west-2b")
    now = [1_800_000_000.0]
    subject = provider(account)
    subject.inventory.clock = lambda: now[0]
    for _ in range(2):
        with pytest.raises(InsufficientCapacity):
            subject.launch(wanted())
    asked = account.cloud.door.calls["CreateFleet"]
    now[0] += BLOCK_S + 1
    with pytest.raises(InsufficientCapacity):
        subject.launch(wanted())
    assert (asked, account.cloud.door.calls["CreateFleet"]) == (2, 4)


@pytest.mark.case("A09")
@pytest.mark.parametrize("code", ["VcpuLimitExceeded", "MaxSpotInstanceCountExceeded"])
def test_a_quota_is_told_and_no_other_zone_is_tried(account: Account, code: str) -> None:
    account.cloud.door.inject(Fault(action="CreateFleet", code=code, message="limit reached", times=9))
    with pytest.raises(QuotaExceeded, match=rf"{code}.*servicequotas"):
        provider(account).launch(wanted())
    assert account.cloud.door.calls["CreateFleet"] == 1
    assert account.living() == []


def test_a_missing_permission_names_the_policy_to_attach(account: Account) -> None:
    account.cloud.door.inject(
        Fault(action="CreateFleet", code="UnauthorizedOperation", message="no", status=403)
    )
    with pytest.raises(InvalidRequest, match="controller policy"):
        provider(account).launch(wanted())


@pytest.mark.case("A21")
@pytest.mark.slow
def test_throttling_is_waited_out(account: Account) -> None:
    account.cloud.door.inject(
        Fault(action="DescribeInstances", code="RequestLimitExceeded", message="slow", status=503, times=5)
    )
    assert list(provider(account).list_nodes(RUN)) == []
    assert len(account.cloud.door.fired) == 5


def test_the_start_script_keeps_arguments_byte_for_byte(account: Account) -> None:
    name = provider(account).launch(wanted()).launched[0].name
    script = base64.b64decode(str(account.cloud.instance(name).user_data)).decode()
    assert """digits-1 'a b' '$HOME' 50%d ''""" in script
    assert "shutdown -h +1440" in script


def test_a_run_makes_one_template_version_and_teardown_deletes_it(account: Account) -> None:
    subject = provider(account)
    subject.launch(wanted(1, "a"))
    subject.launch(wanted(1, "b"))
    ec2 = account.client("ec2")

    def versions() -> list[int]:
        found = ec2.describe_launch_template_versions(LaunchTemplateId=account.base.launch_template)
        return [version["VersionNumber"] for version in found["LaunchTemplateVersions"]]

    assert versions() == [1, 2]
    subject.teardown(RUN)
    assert versions() == [1]
    assert account.living() == []


def test_runs_do_not_end_each_others_nodes(account: Account) -> None:
    other = provider(account).launch(wanted(1, run=RunId("digits-2"))).launched[0].name
    subject = provider(account)
    subject.launch(wanted())
    subject.terminate(RUN, [other])
    subject.teardown(RUN)
    assert account.living() == [other]


def test_a_node_that_is_not_described_yet_is_not_launched_twice(account: Account) -> None:
    subject = provider(account)
    made = subject.launch(wanted())
    # As if it were not seen yet: EC2 is eventually consistent.
    account.client("ec2").delete_tags(Resources=[made.launched[0].name], Tags=[{"Key": "elastic:run"}])
    assert [node.name for node in subject.list_nodes(RUN)] == [made.launched[0].name]
    assert [node.name for node in subject.launch(wanted()).launched] == [made.launched[0].name]


def send(account: Account, name: str, kind: str = "EC2 Spot Instance Interruption Warning") -> None:
    event = {
        "source": "aws.ec2",
        "detail-type": kind,
        "time": datetime.now(UTC).isoformat().replace("+00:00", "Z"),
        "detail": {"instance-id": name, "instance-action": "terminate"},
    }
    account.client("sqs").send_message(
        QueueUrl=account.base.interruption_queue, MessageBody=json.dumps(event)
    )


def test_a_notice_is_told_once_and_its_pool_is_avoided(account: Account) -> None:
    subject = provider(account)
    name = subject.launch(wanted()).launched[0].name
    send(account, name)
    (notice,) = subject.interruptions(RUN)
    assert notice.instance == name
    assert 100 < notice.deadline - datetime.now(UTC).timestamp() <= 120
    assert subject.interruptions(RUN) == []
    replacement = subject.launch(wanted(1, "replace")).launched[0].name
    assert account.cloud.instance(name).instance_type == "m5.large"
    assert account.cloud.instance(replacement).instance_type == "c5.large"


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("EC2 Spot Instance Interruption Warning", "spot interruption"),
        ("EC2 Instance Rebalance Recommendation", "rebalance recommendation"),
    ],
)
def test_a_node_with_a_notice_is_on_its_way_out_for_the_flow_that_drives_the_run(
    account: Account, kind: str, reason: str
) -> None:
    watcher, driver = provider(account), replace(provider(account), drives=True)
    name = driver.launch(wanted()).launched[0].name
    send(account, name, kind)
    assert [node.state for node in watcher.list_nodes(RUN)] == [InstanceState.RUNNING]
    assert [(node.state, node.detail) for node in driver.list_nodes(RUN)] == [
        (InstanceState.STOPPING, reason)
    ]
    account.cloud.ended(name)


@pytest.mark.case("A21")
def test_nodes_are_not_asked_for_more_often_than_every_five_seconds(account: Account) -> None:
    now = [1_800_000_000.0]
    subject = provider(account)
    subject.inventory.clock = lambda: now[0]
    for _ in range(60):
        subject.list_nodes(RUN)
        now[0] += 1.0
    assert 10 <= account.cloud.door.calls["DescribeInstances"] <= 12
    launched = subject.launch(wanted()).launched[0].name
    assert [node.name for node in subject.list_nodes(RUN)] == [launched]  # a change of ours is seen at once


def test_a_notice_for_another_run_is_left_for_it(account: Account) -> None:
    other = provider(account).launch(wanted(1, run=RunId("digits-2"))).launched[0].name
    send(account, other)
    assert provider(account).interruptions(RUN) == []
    attributes = account.client("sqs").get_queue_attributes(
        QueueUrl=account.base.interruption_queue, AttributeNames=["ApproximateNumberOfMessagesNotVisible"]
    )
    assert attributes["Attributes"]["ApproximateNumberOfMessagesNotVisible"] == "1"


def test_what_machines_cost_is_noted_at_the_prices_of_their_launch(account: Account) -> None:
    account.cloud.market.price[Pool("c5.large", "us-west-2a", "spot")] = 0.04
    subject = replace(provider(account), drives=True)
    subject.launch(wanted(2))
    account.cloud.market.price[Pool("c5.large", "us-west-2a", "spot")] = 0.08
    assert [machine.usd_per_hour for machine in subject.spending.machines(RUN)] == [0.04, 0.04]
    subject.teardown(RUN)
    assert all(machine.ended_at is not None for machine in subject.spending.machines(RUN))


def test_a_launch_beyond_the_budget_is_made_smaller_or_refused(account: Account) -> None:
    subject = provider(account, budget_usd=1.0, max_hours=1.0)  # 0.35 $ a node and hour
    made = subject.launch(wanted(3))
    assert (len(made.launched), made.shortfall) == (2, 1)
    with pytest.raises(
        QuotaExceeded, match=r"pool.budget_usd: another machine at \$0.350.*from \$0.70 beyond"
    ):
        provider(account, budget_usd=1.0, max_hours=1.0).launch(wanted(1, "more"))
    assert len(account.living()) == 2


@pytest.mark.case("A19")
def test_an_empty_account_has_nothing_to_list_or_end(account: Account) -> None:
    subject = provider(account)
    assert list(subject.list_nodes(RUN)) == []
    subject.teardown(RUN)


def test_teardown_of_what_does_not_end_is_bounded_and_names_it(account: Account) -> None:
    account.cloud.listener = lambda instance: None  # no host layer answers: it stays shutting-down
    subject = provider(account)
    name = subject.launch(wanted()).launched[0].name
    now = [1_800_000_000.0]
    subject.inventory.clock = lambda: now[0]
    subject.inventory.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)
    with pytest.raises(ProviderUnavailable, match=name):
        subject.teardown(RUN)


@pytest.mark.case("A04")
def test_nodes_that_may_not_be_ended_are_named_and_etcd_is_ended_all_the_same(
    account: Account, tmp_path: Path
) -> None:
    subject = provider(account)
    nodes = [node.name for node in subject.launch(wanted(2)).launched]
    etcd(account, tmp_path)
    account.cloud.door.inject(Fault(action="TerminateInstances", code="UnauthorizedOperation", status=403))
    with pytest.raises(InvalidRequest, match=r"^TerminateInstances: UnauthorizedOperation") as caught:
        subject.teardown(RUN)
    assert all(name in str(caught.value) for name in nodes)
    assert sorted(account.living()) == sorted(nodes)


@pytest.mark.case("A04")
def test_a_call_to_end_nodes_that_is_not_answered_is_made_again(account: Account) -> None:
    subject = provider(account)
    subject.launch(wanted(2))
    subject.inventory.clients = replace(subject.inventory.clients, ec2=account.client("ec2", attempts=1))
    account.cloud.door.inject(Fault(action="TerminateInstances", status=500, times=3))
    subject.teardown(RUN)
    assert account.living() == []
    assert len(account.cloud.door.fired) == 3


@pytest.mark.case("A04")
def test_all_that_a_teardown_could_not_do_is_told_first_things_first(
    account: Account, tmp_path: Path
) -> None:
    subject = provider(account)
    subject.launch(wanted())
    etcd(account, tmp_path)
    for call in ("TerminateInstances", "DeleteLaunchTemplateVersions"):
        account.cloud.door.inject(Fault(action=call, code="AccessDenied", status=403, times=2))
    with pytest.raises(InvalidRequest) as caught:
        subject.teardown(RUN)
    told = [part.split(":")[0] for part in str(caught.value).split("; ")]
    assert told == ["TerminateInstances", "TerminateInstances", "DeleteLaunchTemplateVersions"]


@pytest.mark.case("A03")
@pytest.mark.parametrize("lose_reply", [False, True], ids=["fails", "reply lost"])
@pytest.mark.parametrize("call", ["CreateLaunchTemplateVersion", "CreateFleet"])
@pytest.mark.parametrize("nth", [0, 1])
def test_whatever_call_fails_nothing_is_left_and_a_rerun_succeeds(
    account: Account, call: str, nth: int, lose_reply: bool
) -> None:
    fault = Fault(action=call, code="UnauthorizedOperation", status=403, skip=nth, lose_reply=lose_reply)
    account.cloud.door.inject(fault)
    subject = provider(account)
    try:
        subject.launch(wanted(1, "a"))
        subject.launch(wanted(1, "b"))
    except InvalidRequest:
        pass
    finally:
        subject.teardown(RUN)
    assert account.living() == []
    account.cloud.door.heal()
    assert len(provider(account).launch(wanted(2, "rerun")).launched) == 2
    assert {node.state for node in provider(account).list_nodes(RUN)} <= {
        InstanceState.RUNNING,
        InstanceState.ENDED,
    }


SHUTDOWN = "Client.InstanceInitiatedShutdown: Instance initiated shutdown"


@pytest.mark.case("A07")
@pytest.mark.parametrize(
    ("console", "exit_code", "detail"),
    [
        (
            "boot\r\nelastic-node: the file system could not be mounted\r\n[ 9.1] down",
            72,
            "the file system could not be mounted",
        ),
        ("elastic-node: agent exited with 2\n", 2, SHUTDOWN),
        ("Linux version 6.1", None, SHUTDOWN),
    ],
)
def test_a_machine_that_ended_itself_is_told_with_its_last_word(
    account: Account, console: str, exit_code: int | None, detail: str
) -> None:
    subject = provider(account)
    name = subject.launch(wanted()).launched[0].name
    account.cloud.ended(name, SHUTDOWN)
    account.cloud.said(name, console)
    (node,) = subject.list_nodes(RUN)
    assert (node.exit_code, node.detail) == (exit_code, detail)
    assert account.cloud.door.calls["GetConsoleOutput"] == 1


def test_a_last_word_that_comes_late_is_heard_and_asked_for_no_more(account: Account) -> None:
    subject = provider(account)
    name = subject.launch(wanted()).launched[0].name
    account.cloud.ended(name, SHUTDOWN)
    account.cloud.door.inject(Fault(action="GetConsoleOutput", code="UnauthorizedOperation", status=403))
    told = []
    for said in ("", "elastic-node: no certificate came\n", ""):
        account.cloud.said(name, said)
        subject._looks.clear()
        told.append(subject.list_nodes(RUN)[0].detail)
    assert told == [SHUTDOWN, "no certificate came", "no certificate came"]
    assert account.cloud.door.calls["GetConsoleOutput"] == 2


def test_a_machine_that_was_ended_by_others_is_not_asked_why(account: Account) -> None:
    subject = provider(account)
    name = subject.launch(wanted()).launched[0].name
    subject.terminate(RUN, [name])
    assert subject.list_nodes(RUN)[0].state is InstanceState.ENDED
    assert account.cloud.door.calls["GetConsoleOutput"] == 0


@pytest.mark.case("A13")
def test_tags_are_part_of_what_is_created_and_never_put_on_afterwards(
    account: Account, tmp_path: Path
) -> None:
    account.cloud.door.inject(
        Fault(action="CreateTags", code="UnauthorizedOperation", status=403, times=1000)
    )
    etcd(account, tmp_path)
    provider(account).launch(wanted(2))
    assert account.cloud.door.fired == []
    ec2 = account.client("ec2")
    reservations = ec2.describe_instances()["Reservations"]
    made = [*(one for each in reservations for one in each["Instances"]), *ec2.describe_volumes()["Volumes"]]
    assert len(made) == 6
    assert [one for one in made if "elastic:run" not in {tag["Key"] for tag in one["Tags"]}] == []


@pytest.mark.case("A18")
def test_a_machine_image_that_does_not_resolve_is_told_in_awss_words(account: Account) -> None:
    said = "Value (/aws/service/none) for parameter ImageId is invalid: it does not resolve to an AMI"
    account.cloud.door.inject(Fault(action="CreateFleet", code="InvalidParameterValue", message=said))
    with pytest.raises(InvalidRequest) as raised:
        provider(account).launch(wanted())
    assert said in str(raised.value)
    assert account.living() == []
