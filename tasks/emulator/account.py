"""The base of a cluster in the emulated account, as `infra/terraform` makes it, in a second."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, Final

import boto3

from tasks.emulator.cloud import Cloud
from tasks.providers.aws.base import Base
from tasks.providers.aws.inventory import CLUSTER_TAG

CREDENTIALS: Final = {"aws_access_key_id": "emulated", "aws_secret_access_key": "emulated"}
ETCD_PORT: Final = 2379
NFS_PORT: Final = 2049


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseMaker:
    """Makes what outlives a job, with the calls that Terraform would make.

    Attributes:
        network: Of the VPC; machines get addresses of it, so no other network here may have it.
    """

    cloud: Cloud
    cluster: str
    region: str
    zones: Sequence[str]
    network: IPv4Network

    def make(self) -> Base:
        """Make network, file system, role, launch template and queue; return them."""
        vpc = self._client("ec2").create_vpc(CidrBlock=str(self.network))["Vpc"]["VpcId"]
        ranges = self.network.subnets(new_prefix=self.network.prefixlen + 4)
        subnets = {
            zone: self._subnet(vpc, zone, str(cidr)) for zone, cidr in zip(self.zones, ranges, strict=False)
        }
        node, etcd, storage = (self._group(vpc, role) for role in ("node", "etcd", "storage"))
        self._admit(node, node, None)
        self._admit(etcd, node, ETCD_PORT)
        for client in (node, etcd):
            self._admit(storage, client, NFS_PORT)
        file_system, access_point = self._file_system(list(subnets.values()), storage)
        return Base(
            cluster=self.cluster,
            region=self.region,
            vpc=vpc,
            subnets=subnets,
            node_security_group=node,
            etcd_security_group=etcd,
            storage_security_group=storage,
            file_system=file_system,
            file_system_is_yours=False,
            access_point=access_point,
            bucket=self.cluster,
            repository_url=f"123456789012.dkr.ecr.{self.region}.amazonaws.com/{self.cluster}",
            launch_template=self._template(node),
            instance_profile=f"{self.cluster}-node",
            log_group=f"/elastic/{self.cluster}",
            interruption_queue=self._queue(),
        )

    def _client(self, service: str) -> Any:
        return _client(service, self.region, self.cloud.url)

    def _subnet(self, vpc: str, zone: str, cidr: str) -> str:
        made = self._client("ec2").create_subnet(VpcId=vpc, AvailabilityZone=zone, CidrBlock=cidr)
        return str(made["Subnet"]["SubnetId"])

    def _group(self, vpc: str, role: str) -> str:
        name = f"{self.cluster}-{role}"
        made = self._client("ec2").create_security_group(GroupName=name, Description=role, VpcId=vpc)
        return str(made["GroupId"])

    def _admit(self, group: str, source: str, port: int | None) -> None:
        ports = (
            {"IpProtocol": "-1"} if port is None else {"IpProtocol": "tcp", "FromPort": port, "ToPort": port}
        )
        self._client("ec2").authorize_security_group_ingress(
            GroupId=group, IpPermissions=[{**ports, "UserIdGroupPairs": [{"GroupId": source}]}]
        )

    def _file_system(self, subnets: Sequence[str], group: str) -> tuple[str, str]:
        efs = self._client("efs")
        made = efs.create_file_system(CreationToken=self.cluster, Encrypted=True)["FileSystemId"]
        for subnet in subnets:
            efs.create_mount_target(FileSystemId=made, SubnetId=subnet, SecurityGroups=[group])
        point = efs.create_access_point(
            FileSystemId=made,
            ClientToken=self.cluster,
            PosixUser={"Uid": 1000, "Gid": 1000},
            RootDirectory={"Path": f"/elastic/{self.cluster}"},
        )
        return made, point["AccessPointId"]

    def _template(self, group: str) -> str:
        iam, profile = self._client("iam"), f"{self.cluster}-node"
        if profile not in {
            p["InstanceProfileName"] for p in iam.list_instance_profiles()["InstanceProfiles"]
        }:
            iam.create_instance_profile(InstanceProfileName=profile)
        disk = {"VolumeSize": 20, "Encrypted": True, "DeleteOnTermination": True}
        made = self._client("ec2").create_launch_template(
            LaunchTemplateName=self.cluster,
            LaunchTemplateData={
                "ImageId": "ami-12c6146b",
                "SecurityGroupIds": [group],
                "IamInstanceProfile": {"Name": profile},
                "InstanceInitiatedShutdownBehavior": "terminate",
                "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
                "UserData": base64.b64encode(b"#!/bin/bash\n").decode(),
                "BlockDeviceMappings": [{"DeviceName": "/dev/xvda", "Ebs": disk}],
            },
            TagSpecifications=[
                {
                    "ResourceType": "launch-template",
                    "Tags": [{"Key": CLUSTER_TAG, "Value": self.cluster}],
                }
            ],
        )
        return str(made["LaunchTemplate"]["LaunchTemplateId"])

    def _queue(self) -> str:
        """Return the queue of spot notices, with the rule that fills it."""
        sqs, events = self._client("sqs"), self._client("events")
        queue = str(sqs.create_queue(QueueName=f"{self.cluster}-interruptions")["QueueUrl"])
        sqs.purge_queue(QueueUrl=queue)
        arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        kinds = ["EC2 Spot Instance Interruption Warning", "EC2 Instance Rebalance Recommendation"]
        rule = f"{self.cluster}-interruptions"
        pattern = {"source": ["aws.ec2"], "detail-type": kinds}
        events.put_rule(Name=rule, EventPattern=json.dumps(pattern))
        events.put_targets(Rule=rule, Targets=[{"Id": "queue", "Arn": arn}])
        return queue


@cache
def _client(service: str, region: str, url: str) -> Any:
    return boto3.client(service, region_name=region, endpoint_url=url, **CREDENTIALS)


def write_base(base: Base, path: Path) -> None:
    """Write a base as `terraform output -json` does."""
    path.write_text(json.dumps({"base": {"value": base.model_dump()}}, indent=2))
