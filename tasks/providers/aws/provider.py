"""EC2 nodes: launched by instant fleets, found by tag, ended by id.

`DescribeInstances` by tag is the truth, and it is late: ids from a launch's answer
are remembered and joined to it, so that a node which is not seen yet is not
launched twice. Tags are part of every create call; nothing is tagged afterwards.
"""

from __future__ import annotations

import base64
import hashlib
import json
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Final

from elastic_core.cluster.provider import (
    Instance,
    InstanceState,
    InterruptionNotice,
    LaunchRequest,
    LaunchResult,
)
from elastic_core.errors import InsufficientCapacity, ProviderError, QuotaExceeded
from elastic_core.ids import RunId
from elastic_core.model.job import AwsPool
from tasks.providers.aws.base import Base
from tasks.providers.aws.boot import NodeBoot
from tasks.providers.aws.console import Consoles
from tasks.providers.aws.faults import naming
from tasks.providers.aws.fleet import FleetOrder, Market, Pool, PoolMemory, read_answer
from tasks.providers.aws.inventory import Described, Inventory, Role
from tasks.providers.aws.spending import Spending

NOTICES: Final[Mapping[str, str]] = {
    "EC2 Spot Instance Interruption Warning": "spot interruption",
    "EC2 Instance Rebalance Recommendation": "rebalance recommendation",
}
"""What the queue tells, and why a node leaves then; its agent hears the same from the machine itself."""

NOTICE_S: Final = 120.0
"""Seconds between a spot notice and the instance's end."""

SEEN_WITHIN_S: Final = 90.0
"""An instance from a launch's answer may be missing from DescribeInstances for so long."""


LOOK_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class _Look:
    """What was seen of a run's nodes, and until when that is good enough."""

    nodes: tuple[Instance, ...]
    until: float


@dataclass(slots=True)
class AwsProvider:
    """Nodes as EC2 instances (`elastic_core.cluster.provider.NodeProvider`).

    Attributes:
        pool: Types, market, zones and limits.
        inventory: Where instances are found.
        runs: Directory of all runs' directories, on the cluster's file system.
        drives: Whether the caller drives the run: it alone takes notices from the queue.
    """

    pool: AwsPool
    inventory: Inventory
    runs: Path
    drives: bool = False
    _memory: PoolMemory = field(default_factory=PoolMemory)
    _launched: dict[RunId, dict[str, Described]] = field(default_factory=dict)
    _leaving: dict[str, InterruptionNotice] = field(default_factory=dict)
    _looks: dict[RunId, _Look] = field(default_factory=dict)
    _consoles: Consoles = field(init=False)

    def __post_init__(self) -> None:
        self._consoles = Consoles(self.inventory.clients.ec2)

    @property
    def spending(self) -> Spending:
        """What runs have spent, and may."""
        ec2, clock = self.inventory.clients.ec2, self.inventory.clock
        return Spending(pool=self.pool, ec2=ec2, runs=self.runs, clock=clock)

    @property
    def _base(self) -> Base:
        return self.inventory.base

    # ---- launching -----------------------------------------------------------------------------

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Launch what the token has not launched yet: zone by zone, spot before on-demand.

        Raises:
            InsufficientCapacity: Not a single node could be had anywhere.
            QuotaExceeded: Not a single node is within the account's limit or the budget; no other zone is
                tried.
        """
        self._looks.pop(request.run, None)
        known = self._known(request.run)
        mine = [item for item in known if item.token == request.token]
        wanted = request.count - len(mine)
        reasons: list[str] = []
        if wanted > 0:
            version = self._template_version(request)
            for zone, market in self._plan(known):
                try:
                    got, why = self._order(request, version, zone, market, wanted)
                except QuotaExceeded as error:
                    if not mine:
                        raise
                    reasons.append(str(error))  # of the rest; what was launched counts
                    break
                mine += got
                wanted -= len(got)
                reasons += why
                if wanted <= 0:
                    break
        if not mine:
            raise InsufficientCapacity(f"no capacity for {request.count} node(s): {'; '.join(reasons)}")
        return LaunchResult(
            launched=tuple(item.instance for item in mine),
            shortfall=max(0, wanted),
            reason="; ".join(reasons),
        )

    def _plan(self, known: Sequence[Described]) -> Iterator[tuple[str, Market]]:
        """Yield where to ask, in order. Nodes of one run share a zone: traffic between zones is billed."""
        living = [item.zone for item in known if item.instance.state is not InstanceState.ENDED]
        zones = [living[0]] if living else list(self.pool.zones or self._base.subnets)
        markets: tuple[Market, ...] = {
            "spot": ("spot",),
            "on-demand": ("on-demand",),
            "spot-then-on-demand": ("spot", "on-demand"),
        }[self.pool.market]  # type: ignore[assignment]  # literals of a table
        for market in markets:
            for zone in zones:
                yield zone, market

    def _order(
        self, request: LaunchRequest, version: str, zone: str, market: Market, count: int
    ) -> tuple[list[Described], tuple[str, ...]]:
        now = self.inventory.clock()
        types = tuple(
            kind
            for kind in self.pool.instance_types
            if not self._memory.is_blocked(Pool(kind, zone, market), now)
        )
        if not types:
            return [], (f"{market} in {zone}: all types were without capacity lately",)
        prices = self.spending.prices(types, zone, market)
        order = FleetOrder(
            count=self.spending.allow(request.run, count, prices),
            market=market,
            zone=zone,
            subnet=self._base.subnets[zone],
            instance_types=types,
            template=self._base.launch_template,
            template_version=version,
            token=f"{request.run}/{request.token}",
            tags=self.inventory.tags(request.run, "node", request.token, self.pool.max_hours),
        )
        with naming("CreateFleet"):
            answer = read_answer(order, self.inventory.clients.ec2.create_fleet(**order.request()))
        for pool in answer.exhausted:
            self._memory.block(pool, now)
        if answer.error is not None and not answer.instances:
            raise answer.error
        self.spending.note_launch(request.run, answer.instances, market, prices)
        got = [
            Described(
                instance=Instance(name=name, state=InstanceState.PENDING, log=self._base.log_group),
                token=request.token,
                at=now,
                zone=zone,
                kind=kind,
                spot=market == "spot",
            )
            for name, kind in answer.instances.items()
        ]
        self._launched.setdefault(request.run, {}).update({item.instance.name: item for item in got})
        return got, answer.reasons

    def _template_version(self, request: LaunchRequest) -> str:
        """Return the launch-template version with this run's start script, made if there is none."""
        boot = NodeBoot(
            base=self._base,
            image=self.pool.image or f"{self._base.repository_url}:latest",
            mount=self.pool.mount,
            logs=self.runs.absolute() / request.run / "logs",
            command=request.command,
            environment=request.environment,
            shm_gib=self.pool.shm_gib,
            max_minutes=int(self.pool.max_hours * 60),
            gpus=any(kind.startswith(("g", "p")) for kind in self.pool.instance_types),
        )
        data = base64.b64encode(boot.script().encode()).decode()
        digest = hashlib.sha256(data.encode()).hexdigest()[:16]
        description = f"{request.run} {digest}"
        for version in self._template_versions():
            if version.get("VersionDescription") == description:
                return str(version["VersionNumber"])
        with naming("CreateLaunchTemplateVersion"):
            made = self.inventory.clients.ec2.create_launch_template_version(
                LaunchTemplateId=self._base.launch_template,
                SourceVersion="1",
                VersionDescription=description,
                LaunchTemplateData={"UserData": data},
            )
        return str(made["LaunchTemplateVersion"]["VersionNumber"])

    def _template_versions(self) -> Iterator[Mapping[str, Any]]:
        with naming("DescribeLaunchTemplateVersions"):
            pages = self.inventory.clients.ec2.get_paginator("describe_launch_template_versions").paginate(
                LaunchTemplateId=self._base.launch_template
            )
            for page in pages:
                yield from page["LaunchTemplateVersions"]

    # ---- looking -------------------------------------------------------------------------------

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return a run's instances; ended ones for about an hour, as long as EC2 shows them.

        One that EC2 will take away is on its way out, so that another is launched at once: it boots
        while the old one trains on. Looked up every five seconds at most, or at once after a change of ours.
        """
        look = self._looks.get(run)
        if look is not None and self.inventory.clock() < look.until:
            return look.nodes
        if self.drives:
            self.interruptions(run)
        nodes = tuple(
            self._consoles.with_last_word(self._with_notice(item.instance)) for item in self._known(run)
        )
        if self.drives:
            self.spending.note_ends(run, [node.name for node in nodes if node.state is InstanceState.ENDED])
        pause = LOOK_S * random.uniform(1.0, 1.2)  # flows that began together do not ask together
        self._looks[run] = _Look(nodes, self.inventory.clock() + pause)
        return nodes

    def _with_notice(self, instance: Instance) -> Instance:
        notice = self._leaving.get(instance.name)
        if notice is None or instance.state is InstanceState.ENDED:
            return instance
        return replace(instance, state=InstanceState.STOPPING, detail=notice.reason)

    def _known(self, run: RunId) -> list[Described]:
        seen = {item.instance.name: item for item in self.inventory.described(run, "node")}
        unseen = self._launched.get(run, {})
        for name, item in list(unseen.items()):
            if name in seen or self.inventory.clock() - item.at > SEEN_WITHIN_S:
                del unseen[name]
            else:
                seen[name] = item
        return sorted(seen.values(), key=lambda item: (item.at, item.instance.name))

    def interruptions(self, run: RunId) -> Sequence[InterruptionNotice]:
        """Return spot notices of a run's nodes, and avoid the pools that they come from."""
        mine = {item.instance.name: item for item in self._known(run)}
        notices = []
        with naming("ReceiveMessage"):
            answer = self.inventory.clients.sqs.receive_message(
                QueueUrl=self._base.interruption_queue, MaxNumberOfMessages=10, VisibilityTimeout=5
            )
        for message in answer.get("Messages", ()):
            event = json.loads(message["Body"])
            name = event.get("detail", {}).get("instance-id", "")
            if name not in mine:
                continue  # another run's: it comes back for its owner when the visibility ends
            if reason := NOTICES.get(event.get("detail-type", "")):
                self._leaving[name] = self._notice(event, name, reason)
                notices.append(self._leaving[name])
                self._memory.block(Pool(mine[name].kind, mine[name].zone, "spot"), self.inventory.clock())
            with naming("DeleteMessage"):
                self.inventory.clients.sqs.delete_message(
                    QueueUrl=self._base.interruption_queue, ReceiptHandle=message["ReceiptHandle"]
                )
        return notices

    @staticmethod
    def _notice(event: Mapping[str, Any], name: str, reason: str) -> InterruptionNotice:
        told = datetime.fromisoformat(str(event["time"]).replace("Z", "+00:00")).timestamp()
        return InterruptionNotice(instance=name, deadline=told + NOTICE_S, reason=reason)

    # ---- ending --------------------------------------------------------------------------------

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """Terminate instances of this run; others and unknown ones are left alone."""
        self._looks.pop(run, None)
        mine = [item.instance.name for item in self._known(run) if item.instance.name in names]
        self.inventory.terminate(mine)

    def teardown(self, run: RunId) -> None:
        """Terminate all instances of a run, nodes before etcd, wait for their end, forget its versions.

        Every step is tried, also after another failed.

        Raises:
            ProviderError: The first failure, the others in its message, which says what is left.
        """
        self._looks.pop(run, None)
        problems: list[ProviderError] = []
        roles: tuple[Role, ...] = ("node", "etcd")
        for role in roles:
            try:
                self.inventory.end_all(run, role)
            except ProviderError as error:
                problems.append(error)
        try:
            self._delete_versions(run)
        except ProviderError as error:
            problems.append(error)
        self._launched.pop(run, None)
        if problems:
            first, *others = problems
            raise type(first)("; ".join(map(str, (first, *others)))) from first
        self.spending.note_ends(run, [machine.machine for machine in self.spending.machines(run)])

    def _delete_versions(self, run: RunId) -> None:
        versions = [
            str(version["VersionNumber"])
            for version in self._template_versions()
            if version.get("VersionDescription", "").startswith(f"{run} ")
        ]
        if versions:
            with naming("DeleteLaunchTemplateVersions"):
                self.inventory.clients.ec2.delete_launch_template_versions(
                    LaunchTemplateId=self._base.launch_template, Versions=versions
                )
