"""An emulated account with the base that Terraform would make, built by boto3 in a second."""

import atexit
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Network
from typing import Any

import boto3
import pytest
from botocore.config import Config

from elastic_core.model.job import AwsPool
from tasks.emulator.account import CREDENTIALS, BaseMaker
from tasks.emulator.cloud import Cloud
from tasks.providers.aws.base import Base

REGION = "us-west-2"
ZONES = ("us-west-2a", "us-west-2b")


@dataclass(frozen=True)
class Account:
    cloud: Cloud
    base: Base

    def client(self, service: str, region: str = REGION, *, attempts: int = 5) -> Any:
        return _client(service, region, self.cloud.url, attempts)

    def pool(self, **changes: Any) -> AwsPool:
        return AwsPool(region=REGION, cluster="demo", endpoint_url=self.cloud.url, **changes)

    def living(self, *states: str) -> list[str]:
        wanted = states or ("pending", "running", "shutting-down")
        return [instance.id for instance in self.cloud.instances() if instance.state in wanted]


@cache
def _client(service: str, region: str, url: str, attempts: int) -> Any:
    config = Config(retries={"total_max_attempts": attempts})
    return boto3.client(service, region_name=region, endpoint_url=url, config=config, **CREDENTIALS)


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
    network = IPv4Network("10.42.0.0/16")
    maker = BaseMaker(cloud=cloud, cluster="demo", region=REGION, zones=ZONES, network=network)
    return Account(cloud, maker.make())
