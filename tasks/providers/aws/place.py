"""What runs have in an AWS region: instances, found by the tags of their cluster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from elastic_core.errors import ProviderError
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


VERSION: Final = "template version"
"""Kind of what holds a run's start script. It costs nothing, but a template takes only so many."""


class AwsPlace:
    """Instances of one cluster, and the start scripts of its runs (`tasks.holdings.Place`).

    They may belong to another machine's runs, so only those that expired, or whose run is known here,
    can be orphans.
    """

    def __init__(self, pool: AwsPool, *, clock: Callable[[], float] = time.time) -> None:
        self.name = f"aws {pool.cluster} in {pool.region}"
        self._pool = pool
        self._ec2 = AwsClients.of(pool).ec2
        self._clock = clock

    def find(self) -> Sequence[Holding]:
        """Return the cluster's instances that carry a run's tag and still cost something, then scripts."""
        return [*self._instances(), *self._versions()]

    def _instances(self) -> Iterator[Holding]:
        filters = [
            {"Name": f"tag:{CLUSTER_TAG}", "Values": [self._pool.cluster]},
            {"Name": "tag-key", "Values": [RUN_TAG]},
            {"Name": "instance-state-name", "Values": _LIVING},
        ]
        with naming("DescribeInstances"):
            pages = self._ec2.get_paginator("describe_instances").paginate(Filters=filters)
            for page in pages:
                for reservation in page["Reservations"]:
                    yield from map(self._holding, reservation["Instances"])

    def _versions(self) -> Iterator[Holding]:
        """Yield the versions beyond the first: their description begins with the run that made them."""
        tagged = [{"Name": f"tag:{CLUSTER_TAG}", "Values": [self._pool.cluster]}]
        with naming("DescribeLaunchTemplates"):
            templates = [
                template["LaunchTemplateId"]
                for page in self._ec2.get_paginator("describe_launch_templates").paginate(Filters=tagged)
                for template in page["LaunchTemplates"]
            ]
        with naming("DescribeLaunchTemplateVersions"):
            versions = self._ec2.get_paginator("describe_launch_template_versions")
            for template in templates:
                for page in versions.paginate(LaunchTemplateId=template):
                    for version in page["LaunchTemplateVersions"]:
                        run, _, digest = version.get("VersionDescription", "").partition(" ")
                        if digest:
                            name = f"{template}:{version['VersionNumber']}"
                            yield Holding(
                                place="aws", kind=VERSION, name=name, run=RunId(run), is_foreign=True
                            )

    def remove(self, holdings: Sequence[Holding]) -> dict[str, str]:
        """Terminate these instances, nodes before etcd, and delete these scripts.

        EC2 goes on by itself once it took the call.
        """
        scripts = [holding.name for holding in holdings if holding.kind == VERSION]
        machines = [holding for holding in holdings if holding.kind != VERSION]
        etcd = [holding.name for holding in machines if holding.detail.startswith("etcd")]
        nodes = [holding.name for holding in machines if not holding.detail.startswith("etcd")]
        failed = terminate(self._ec2, nodes) | terminate(self._ec2, etcd)
        for name in scripts:
            template, _, number = name.partition(":")
            try:
                with naming("DeleteLaunchTemplateVersions"):
                    self._ec2.delete_launch_template_versions(LaunchTemplateId=template, Versions=[number])
            except ProviderError as error:
                failed[name] = error
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
