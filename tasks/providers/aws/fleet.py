"""Fleet requests as values: what is asked of CreateFleet, and what its answer means. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from elastic_core.errors import ProviderError
from tasks.providers.aws.faults import CAPACITY, named

Market = Literal["spot", "on-demand"]

BLOCK_S: Final = 600.0
"""A pool without capacity, or one that just took a node away, is not asked again for so long."""


@dataclass(frozen=True, slots=True)
class Pool:
    """A spot pool: capacity and price are its own."""

    instance_type: str
    zone: str
    market: Market


@dataclass(slots=True)
class PoolMemory:
    """Which pools not to ask for a while."""

    _until: dict[Pool, float] = field(default_factory=dict)

    def block(self, pool: Pool, now: float) -> None:
        """Remember that a pool has no capacity."""
        self._until[pool] = now + BLOCK_S

    def is_blocked(self, pool: Pool, now: float) -> bool:
        """Return whether a pool should not be asked now."""
        return self._until.get(pool, now) > now


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOrder:
    """One CreateFleet call: so many nodes of one market in one zone.

    Attributes:
        tags: Of instances, volumes and the fleet, set in the call itself.
    """

    count: int
    market: Market
    zone: str
    subnet: str
    instance_types: tuple[str, ...]
    template: str
    template_version: str
    token: str
    tags: Mapping[str, str]

    def request(self) -> dict[str, Any]:
        """Return the call's arguments."""
        tags = [{"Key": key, "Value": value} for key, value in sorted(self.tags.items())]
        body: dict[str, Any] = {
            "Type": "instant",  # answers with instances and typed errors, leaves nothing running behind us
            "TargetCapacitySpecification": {
                "TotalTargetCapacity": self.count,
                "DefaultTargetCapacityType": self.market,
            },
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {
                        "LaunchTemplateId": self.template,
                        "Version": self.template_version,
                    },
                    "Overrides": [
                        {"InstanceType": kind, "SubnetId": self.subnet, "Priority": float(place)}
                        for place, kind in enumerate(self.instance_types)
                    ],
                }
            ],
            "TagSpecifications": [
                {"ResourceType": kind, "Tags": tags} for kind in ("instance", "volume", "fleet")
            ],
        }
        if self.market == "spot":
            body["SpotOptions"] = {
                "AllocationStrategy": "price-capacity-optimized",
                "InstanceInterruptionBehavior": "terminate",
            }
        else:
            body["OnDemandOptions"] = {"AllocationStrategy": "prioritized"}
        # A token with other arguments is an error, so the arguments are part of it: a fallback to
        # another zone or type is another call.
        body["ClientToken"] = client_token(self.token, body)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetAnswer:
    """What came of a fleet.

    Attributes:
        instances: Type of what was launched, by id.
        exhausted: Pools that had no capacity.
        error: The first error that is not about capacity, as the exception to raise.
        reasons: Every error in AWS's words, each once.
    """

    instances: Mapping[str, str]
    exhausted: tuple[Pool, ...]
    error: ProviderError | None
    reasons: tuple[str, ...]


def client_token(token: str, arguments: Mapping[str, Any]) -> str:
    """Return an idempotency token of at most 64 characters for one call's arguments."""
    shape = json.dumps([token, arguments], sort_keys=True)
    return hashlib.sha256(shape.encode()).hexdigest()[:48]


def read_answer(order: FleetOrder, response: Mapping[str, Any]) -> FleetAnswer:
    """Sort a fleet's answer into instances, pools to avoid, and the error to raise."""
    instances = {
        instance: str(group.get("InstanceType", ""))
        for group in response.get("Instances", ())
        for instance in group.get("InstanceIds", ())
    }
    exhausted: list[Pool] = []
    reasons: list[str] = []
    error: ProviderError | None = None
    for problem in response.get("Errors", ()):
        code, message = str(problem.get("ErrorCode", "")), str(problem.get("ErrorMessage", ""))
        override = problem.get("LaunchTemplateAndOverrides", {}).get("Overrides", {})
        reasons.append(f"{code}: {message}")
        if code in CAPACITY:
            kinds: Sequence[str] = (
                [override["InstanceType"]] if "InstanceType" in override else order.instance_types
            )
            exhausted.extend(Pool(kind, order.zone, order.market) for kind in kinds)
        elif error is None:
            error = named(code, message, "CreateFleet")
    return FleetAnswer(
        instances=instances,
        exhausted=tuple(dict.fromkeys(exhausted)),
        error=error,
        reasons=tuple(dict.fromkeys(reasons)),
    )
