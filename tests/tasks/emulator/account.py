"""An emulated account with the base that Terraform would make, built by boto3 in a second."""

import atexit
import base64
from dataclasses import dataclass
from functools import cache
from typing import Any

import boto3
import pytest

from elastic_core.model.job import AwsPool
from tasks.emulator.cloud import Cloud
from tasks.providers.aws.base import Base

REGION = "us-west-2"
ZONES = ("us-west-2a", "us-west-2b")


@dataclass(frozen=True)
class Account:
    cloud: Cloud
    base: Base

    def client(self, service: str, region: str = REGION) -> Any:
        return boto3.client(service, region_name=region, endpoint_url=self.cloud.url)

    def pool(self, **changes: Any) -> AwsPool:
        return AwsPool(region=REGION, cluster="demo", endpoint_url=self.cloud.url, **changes)

    def living(self, *states: str) -> list[str]:
        wanted = states or ("pending", "running", "shutting-down")
        return [instance.id for instance in self.cloud.instances() if instance.state in wanted]


@cache
def _one_cloud() -> Cloud:
    """Return the process's one cloud: moto keeps its state in module globals."""
    cloud = Cloud()
    atexit.register(cloud.close)
    return cloud


@pytest.fixture
def cloud() -> Cloud:
    return _one_cloud()


@pytest.fixture
def account(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> Account:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    # A default region elsewhere must not matter: the pool's region decides.
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    cloud.reset()
    cloud.listener = None
    ec2 = boto3.client("ec2", region_name=REGION, endpoint_url=cloud.url)
    sqs = boto3.client("sqs", region_name=REGION, endpoint_url=cloud.url)
    iam = boto3.client("iam", region_name=REGION, endpoint_url=cloud.url)
    vpc = ec2.create_vpc(CidrBlock="10.42.0.0/16")["Vpc"]["VpcId"]
    subnets = {
        zone: ec2.create_subnet(VpcId=vpc, AvailabilityZone=zone, CidrBlock=f"10.42.{16 * i}.0/20")["Subnet"][
            "SubnetId"
        ]
        for i, zone in enumerate(ZONES)
    }
    group = ec2.create_security_group(GroupName="demo-node", Description="nodes", VpcId=vpc)["GroupId"]
    if not any(
        p["InstanceProfileName"] == "demo-node" for p in iam.list_instance_profiles()["InstanceProfiles"]
    ):
        iam.create_instance_profile(InstanceProfileName="demo-node")
    template = ec2.create_launch_template(
        LaunchTemplateName="demo",
        LaunchTemplateData={
            "ImageId": "ami-12c6146b",
            "SecurityGroupIds": [group],
            "IamInstanceProfile": {"Name": "demo-node"},
            "InstanceInitiatedShutdownBehavior": "terminate",
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "UserData": base64.b64encode(b"#!/bin/bash\n").decode(),
            "BlockDeviceMappings": [
                {
                    "DeviceName": "/dev/xvda",
                    "Ebs": {"VolumeSize": 20, "Encrypted": True, "DeleteOnTermination": True},
                }
            ],
        },
    )["LaunchTemplate"]["LaunchTemplateId"]
    queue = sqs.create_queue(QueueName="demo-interruptions")["QueueUrl"]
    sqs.purge_queue(QueueUrl=queue)
    base = Base(
        cluster="demo",
        region=REGION,
        vpc=vpc,
        subnets=subnets,
        node_security_group=group,
        etcd_security_group=group,
        file_system="fs-0123456789abcdef0",
        file_system_is_yours=False,
        access_point="fsap-0123456789abcdef0",
        bucket="demo",
        repository_url="123456789012.dkr.ecr.us-west-2.amazonaws.com/demo",
        launch_template=template,
        instance_profile="demo-node",
        log_group="/elastic/demo",
        interruption_queue=queue,
    )
    return Account(cloud, base)
