"""What runs have in an AWS region: instances, found by the tags of their cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from elastic_core.ids import RunId
from elastic_core.model.job import AwsPool
from tasks.holdings import Holding
from tasks.providers.aws.faults import naming
from tasks.providers.aws.inventory import (
    CLUSTER_TAG,
    EXPIRES_TAG,
    ROLE_TAG,
    RUN_TAG,
    AwsClients,
    terminate,
)

_LIVING = ["pending", "running", "stopping", "stopped"]


class AwsPlace:
    """Instances of one cluster (`tasks.holdings.Place`).

    They may belong to another machine's runs, so only those that expired, or whose run is known here,
    can be orphans.
    """

    def __init__(self, pool: AwsPool, *, clock: Callable[[], float] = time.time) -> None:
        self.name = f"aws {pool.cluster} in {pool.region}"
        self._pool = pool
        self._ec2 = AwsClients.of(pool).ec2
        self._clock = clock

    def find(self) -> Sequence[Holding]:
        """Return the cluster's instances that carry a run's tag and still cost something."""
        filters = [
            {"Name": f"tag:{CLUSTER_TAG}", "Values": [self._pool.cluster]},
            {"Name": "tag-key", "Values": [RUN_TAG]},
            {"Name": "instance-state-name", "Values": _LIVING},
        ]
        with naming("DescribeInstances"):
            pages = self._ec2.get_paginator("describe_instances").paginate(Filters=filters)
            return [
                self._holding(instance)
                for page in pages
                for reservation in page["Reservations"]
                for instance in reservation["Instances"]
            ]

    def remove(self, holdings: Sequence[Holding]) -> dict[str, str]:
        """Terminate these instances, nodes before etcd; EC2 goes on by itself once it took the call."""
        etcd = [holding.name for holding in holdings if holding.detail.startswith("etcd")]
        nodes = [holding.name for holding in holdings if not holding.detail.startswith("etcd")]
        failed = terminate(self._ec2, nodes) | terminate(self._ec2, etcd)
        return {name: str(error) for name, error in failed.items()}

    def _holding(self, instance: Mapping[str, Any]) -> Holding:
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        expires = tags.get(EXPIRES_TAG, "")
        return Holding(
            place="aws",
            kind="instance",
            name=instance["InstanceId"],
            run=RunId(tags[RUN_TAG]),
            detail=" ".join(
                filter(None, (tags.get(ROLE_TAG), instance["State"]["Name"], expires and f"until {expires}"))
            ),
            has_expired=self._is_over(expires),
            is_foreign=True,
        )

    def _is_over(self, expires: str) -> bool:
        try:
            return datetime.fromisoformat(expires.replace("Z", "+00:00")).timestamp() < self._clock()
        except ValueError:
            return False
