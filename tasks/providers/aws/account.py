"""Can this account train? Credentials, region, base and quota, asked with calls that change nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import boto3
from botocore.exceptions import BotoCoreError, ClientError

from elastic_core.model.job import AwsPool
from tasks.providers.aws.faults import CLIENT_CONFIG
from tasks.providers.aws.inventory import CLUSTER_TAG

QUOTAS = {"g": "L-3819A6DF", "p": "L-7212CCBC", "": "L-34B43A08"}
"""Quota of spot vCPUs by the first letter of an instance type; "" for the standard ones."""


def examine_account(pool: AwsPool) -> Iterator[tuple[str, str, str]]:
    """Yield (check, what is so, remedy or ""); without credentials nothing else is asked."""
    session = boto3.session.Session(region_name=pool.region)
    endpoint = pool.endpoint_url or None

    def client(service: str) -> Any:
        return session.client(service, config=CLIENT_CONFIG, endpoint_url=endpoint)

    try:
        identity = client("sts").get_caller_identity()
    except (BotoCoreError, ClientError) as error:
        remedy = "give credentials: `aws configure`, AWS_PROFILE, or AWS_ACCESS_KEY_ID and its secret"
        yield "credentials", f"AWS does not know who asks: {error}", remedy
        return
    yield "credentials", f"{identity['Arn']}", ""
    yield _region(pool)
    yield _base(client("ec2"), pool)
    yield _quota(client("service-quotas"), pool)


def _region(pool: AwsPool) -> tuple[str, str, str]:
    default = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    also = f"; the environment's {default} is not used" if default not in (None, pool.region) else ""
    return "region", f"{pool.region}{also}", ""


def _base(ec2: Any, pool: AwsPool) -> tuple[str, str, str]:
    filters = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [pool.cluster]}]
    try:
        found = ec2.describe_launch_templates(Filters=filters)["LaunchTemplates"]
    except (BotoCoreError, ClientError) as error:
        return "base", f"cluster {pool.cluster!r}: {error}", "allow ec2:Describe* to this identity"
    if not found:
        told = f"there is no cluster {pool.cluster!r} in {pool.region}"
        return "base", told, "make it: `elastic-train base apply`"
    return "base", f"cluster {pool.cluster!r} is there", ""


def _quota(quotas: Any, pool: AwsPool) -> tuple[str, str, str]:
    code = QUOTAS.get(pool.instance_types[0][0], QUOTAS[""])
    try:
        answer = quotas.get_service_quota(ServiceCode="ec2", QuotaCode=code)
        cpus = answer["Quota"]["Value"]
    except (BotoCoreError, ClientError, KeyError) as error:
        return "quota", f"spot vCPUs ({code}) unknown: {type(error).__name__}", ""
    told = f"{cpus:.0f} spot vCPUs for {pool.instance_types[0]} and its kind ({code})"
    return "quota", told, "" if cpus >= 1 else "ask for more: Service Quotas, EC2, this code"
