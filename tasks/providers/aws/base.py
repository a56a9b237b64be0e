"""The base as the flows know it: one object, read from Terraform's output."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from pydantic import BaseModel, ConfigDict, ValidationError

from elastic_core.errors import RefusedInput
from elastic_core.model.job import AwsPool

BASES: Final = Path(".elastic/base")
"""Directory of what `elastic-train base` made from here: a directory a cluster."""


class Base(BaseModel):
    """What `infra/terraform` made (its output `base`); ids unless said otherwise.

    Attributes:
        subnets: Subnet by zone.
        file_system_is_yours: The user's own file system: never changed, never deleted.
        interruption_queue: URL of the queue with spot notices.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    cluster: str
    region: str
    vpc: str
    subnets: dict[str, str]
    node_security_group: str
    etcd_security_group: str
    storage_security_group: str
    file_system: str
    file_system_is_yours: bool
    access_point: str
    bucket: str
    repository_url: str
    launch_template: str
    instance_profile: str
    log_group: str
    interruption_queue: str


def parse_base(outputs: dict[str, Any], source: str) -> Base:
    """Return the base that Terraform's outputs describe.

    Raises:
        RefusedInput: They are not those of `infra/terraform`; each missing part is named.
    """
    try:
        return Base.model_validate(outputs.get("base", outputs))
    except ValidationError as error:
        missing = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors())
        raise RefusedInput(
            [f"{source}: no base of infra/terraform ({missing} missing): run `elastic-train base apply`"]
        ) from error


def read_base(path: Path) -> Base:
    """Read a base from a file that `terraform output -json` wrote. Raises RefusedInput."""
    try:
        outputs = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RefusedInput(
            [f"base file {str(path)!r}: {error}; `elastic-train base apply` writes it"]
        ) from error
    plain = {name: value.get("value", value) for name, value in outputs.items() if isinstance(value, dict)}
    return parse_base(plain or outputs, str(path))


def base_file(pool: AwsPool) -> Path:
    """Return the file that describes the base of a pool's cluster, whether it is there or not."""
    return Path(pool.base) if pool.base else BASES / pool.cluster / "base.json"


def base_of(pool: AwsPool) -> Base:
    """Return the base of a pool's cluster.

    Raises:
        RefusedInput: Its file cannot be read, or describes another cluster or region.
    """
    base = read_base(base_file(pool))
    file = str(base_file(pool))
    told = {"pool.cluster": (pool.cluster, base.cluster), "pool.region": (pool.region, base.region)}
    problems = [
        f"{field}: is {given!r}, but the base in {file!r} says {there!r}: give that or another base"
        for field, (given, there) in told.items()
        if given != there
    ]
    problems += [
        f"pool.zones: {zone!r} is none of the base's zones ({', '.join(base.subnets)})"
        for zone in pool.zones
        if zone not in base.subnets
    ]
    if problems:
        raise RefusedInput(problems)
    return base
