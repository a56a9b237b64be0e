"""Where moto differs from AWS: one test a patch. The patch's docstring names AWS's documentation."""

import base64
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tasks.emulator.frontdoor import Fault
from tasks.providers.aws.fleet import Pool
from tests.tasks.emulator.account import Account

pytestmark = [pytest.mark.aws, pytest.mark.slow]


def fleet(
    account: Account, count: int, token: str = "", types: tuple[str, ...] = ("m5.large", "c5.large")
) -> Any:
    return account.client("ec2").create_fleet(
        Type="instant",
        **({"ClientToken": token} if token else {}),
        TargetCapacitySpecification={"TotalTargetCapacity": count, "DefaultTargetCapacityType": "spot"},
        LaunchTemplateConfigs=[
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": account.base.launch_template,
                    "Version": "1",
                },
                "Overrides": [
                    {"InstanceType": kind, "SubnetId": account.base.subnets["us-west-2a"]} for kind in types
                ],
            }
        ],
        TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": "job", "Value": "digits"}]}],
    )


def described(account: Account) -> list[dict[str, Any]]:
    pages = account.client("ec2").describe_instances()["Reservations"]
    return [instance for reservation in pages for instance in reservation["Instances"]]


def test_a_fleet_takes_what_the_pools_have_and_names_the_empty_ones(account: Account) -> None:
    account.cloud.market.limit(Pool("m5.large", "us-west-2a", "spot"), 1)
    account.cloud.market.limit(Pool("c5.large", "us-west-2a", "spot"), 1)
    answer = fleet(account, 3)
    assert sorted(group["InstanceType"] for group in answer["Instances"]) == ["c5.large", "m5.large"]
    assert {error["ErrorCode"] for error in answer["Errors"]} == {"InsufficientInstanceCapacity"}


def test_a_fleet_takes_the_cheapest_pool(account: Account) -> None:
    account.cloud.market.price[Pool("m5.large", "us-west-2a", "spot")] = 0.9
    answer = fleet(account, 2)
    assert [(group["InstanceType"], len(group["InstanceIds"])) for group in answer["Instances"]] == [
        ("c5.large", 2)
    ]


def test_a_fleets_instances_are_what_the_template_says(account: Account) -> None:
    fleet(account, 1)
    (instance,) = described(account)
    assert instance["MetadataOptions"]["HttpTokens"] == "required"
    assert instance["IamInstanceProfile"]["Arn"].endswith("/demo-node")
    assert [group["GroupId"] for group in instance["SecurityGroups"]] == [account.base.node_security_group]
    assert [disk["DeviceName"] for disk in instance["BlockDeviceMappings"]] == ["/dev/xvda"]
    assert instance["InstanceLifecycle"] == "spot"
    assert {"job", "aws:ec2:fleet-id"} <= {tag["Key"] for tag in instance["Tags"]}


def test_the_same_token_gives_the_same_answer_and_no_second_fleet(account: Account) -> None:
    first, again = fleet(account, 1, "t1"), fleet(account, 1, "t1")
    assert first["Instances"] == again["Instances"]
    assert len(described(account)) == 1


def test_a_token_with_other_arguments_is_refused(account: Account) -> None:
    fleet(account, 1, "t1")
    with pytest.raises(ClientError, match="IdempotentParameterMismatch"):
        fleet(account, 2, "t1")


def test_a_template_version_has_what_its_source_has(account: Account) -> None:
    made = account.client("ec2").create_launch_template_version(
        LaunchTemplateId=account.base.launch_template,
        SourceVersion="1",
        LaunchTemplateData={"UserData": base64.b64encode(b"#!/bin/sh\n").decode()},
    )["LaunchTemplateVersion"]
    assert made["VersionNumber"] == 2
    versions = account.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=account.base.launch_template, Versions=["2"]
    )["LaunchTemplateVersions"]
    data = versions[0]["LaunchTemplateData"]
    assert data["ImageId"] == "ami-12c6146b"
    assert base64.b64decode(data["UserData"]) == b"#!/bin/sh\n"


def test_a_deleted_versions_number_is_not_used_again(account: Account) -> None:
    ec2 = account.client("ec2")

    def make() -> int:
        version: int = ec2.create_launch_template_version(
            LaunchTemplateId=account.base.launch_template,
            SourceVersion="1",
            LaunchTemplateData={"KeyName": "k"},
        )["LaunchTemplateVersion"]["VersionNumber"]
        return version

    assert make() == 2
    ec2.delete_launch_template_versions(LaunchTemplateId=account.base.launch_template, Versions=["2"])
    assert make() == 3


def test_tags_of_a_template_are_not_tags_of_its_instances(account: Account) -> None:
    made = account.client("ec2").create_launch_template(
        LaunchTemplateName="tagged",
        LaunchTemplateData={"ImageId": "ami-1"},
        TagSpecifications=[{"ResourceType": "launch-template", "Tags": [{"Key": "a", "Value": "b"}]}],
    )["LaunchTemplate"]
    versions = account.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=made["LaunchTemplateId"]
    )
    assert "TagSpecifications" not in versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]


def test_an_instance_shuts_down_before_it_is_terminated(account: Account) -> None:
    changes: list[tuple[str, str]] = []
    account.cloud.listener = lambda instance: changes.append((instance.id, instance.state))
    name = fleet(account, 1)["Instances"][0]["InstanceIds"][0]
    assert described(account)[0]["State"]["Name"] == "pending"
    account.cloud.booted(name)
    assert described(account)[0]["State"]["Name"] == "running"
    account.client("ec2").terminate_instances(InstanceIds=[name])
    assert described(account)[0]["State"]["Name"] == "shutting-down"
    account.cloud.ended(name)
    assert described(account)[0]["State"]["Name"] == "terminated"
    assert changes == [(name, "pending"), (name, "shutting-down")]


def test_the_network_interface_ends_with_its_instance(account: Account) -> None:
    before = interfaces(account)  # those of the mount targets
    name = fleet(account, 1)["Instances"][0]["InstanceIds"][0]
    assert len(interfaces(account) - before) == 1
    account.client("ec2").terminate_instances(InstanceIds=[name])
    assert interfaces(account) == before


def interfaces(account: Account) -> set[str]:
    found = account.client("ec2").describe_network_interfaces()["NetworkInterfaces"]
    return {interface["NetworkInterfaceId"] for interface in found}


def test_a_file_systems_policy_can_be_deleted(account: Account) -> None:
    efs = account.client("efs")
    made = efs.create_file_system(CreationToken="x")["FileSystemId"]
    efs.put_file_system_policy(FileSystemId=made, Policy='{"Version":"2012-10-17","Statement":[]}')
    efs.delete_file_system_policy(FileSystemId=made)
    with pytest.raises(ClientError, match="PolicyNotFound"):
        efs.describe_file_system_policy(FileSystemId=made)
    efs.delete_file_system(FileSystemId=made)


def test_a_rule_between_groups_keeps_its_description(account: Account) -> None:
    ec2, group = account.client("ec2"), account.base.node_security_group
    pairs = [{"GroupId": group, "Description": "NFS"}]
    ec2.authorize_security_group_ingress(
        GroupId=group,
        IpPermissions=[{"IpProtocol": "tcp", "FromPort": 2049, "ToPort": 2049, "UserIdGroupPairs": pairs}],
    )
    rules = ec2.describe_security_group_rules(Filters=[{"Name": "group-id", "Values": [group]}])
    assert "NFS" in [rule.get("Description") for rule in rules["SecurityGroupRules"]]


def test_the_price_history_tells_what_a_pool_costs_now(account: Account) -> None:
    account.cloud.market.price[Pool("m5.large", "us-west-2b", "spot")] = 0.0375
    told = account.client("ec2").describe_spot_price_history(
        InstanceTypes=["m5.large"], Filters=[{"Name": "availability-zone", "Values": ["us-west-2b"]}]
    )["SpotPriceHistory"]
    assert [(price["InstanceType"], float(price["SpotPrice"])) for price in told] == [("m5.large", 0.0375)]


def test_a_console_shows_what_its_machine_said(account: Account) -> None:
    names = [name for group in fleet(account, 2)["Instances"] for name in group["InstanceIds"]]
    account.cloud.said(names[0], "one\ntwo\n")
    shown = [account.client("ec2").get_console_output(InstanceId=name) for name in names]
    assert [one.get("Output", "") for one in shown] == ["one\ntwo\n", ""]


def test_a_fault_fires_where_it_is_armed_and_is_counted(account: Account) -> None:
    fault = Fault(action="DescribeVpcs", code="UnauthorizedOperation", skip=1)
    account.cloud.door.inject(fault)
    account.client("ec2").describe_vpcs()
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        account.client("ec2").describe_vpcs()
    account.client("ec2").describe_vpcs()
    assert account.cloud.door.fired == [fault]
    assert account.cloud.door.calls["DescribeVpcs"] == 3
