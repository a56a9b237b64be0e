"""The base of a cluster on AWS: made, compared and ended by Terraform; state below `.elastic/base`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from elastic_core.errors import RefusedInput
from elastic_core.model.job import AwsPool
from tasks.providers.aws.base import BASES, parse_base
from tasks.providers.aws.terraform import Terraform, TerraformEvent

MODULE: Final = Path(__file__).parents[1] / "infra" / "terraform"

_FIXED: Final = ("region", "file_system_id")
"""What cannot change without ending the base to make another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBase:
    """One cluster's base, as it was or will be made from this directory.

    Attributes:
        cluster: Name: prefix and tag of all that is made.
        module: Terraform's root module.
        tell: Called with each line of progress.
    """

    cluster: str
    module: Path = MODULE
    tell: Callable[[str], None] = print

    @property
    def file(self) -> Path:
        """The file that `pool.base` of a job names."""
        return self._directory / "base.json"

    @property
    def _directory(self) -> Path:
        return BASES / self.cluster

    @property
    def _variables_file(self) -> Path:
        return self._directory / "variables.json"

    def variables(self) -> dict[str, Any]:
        """Return what the base was made with.

        Raises:
            RefusedInput: It was not made from here.
        """
        try:
            found: dict[str, Any] = json.loads(self._variables_file.read_bytes())
        except FileNotFoundError:
            known = sorted(path.parent.name for path in BASES.glob("*/variables.json"))
            there = ", ".join(known) or "none"
            raise RefusedInput(
                [f"--cluster {self.cluster!r}: no base was made from here; known: {there}"]
            ) from None
        return found

    def apply(self, variables: Mapping[str, Any]) -> None:
        """Make the base, or bring it to what the module says; goes on with one that was interrupted.

        Raises:
            RefusedInput: Bad values, or others than it was made with.
            ProviderError: Terraform failed; its own words.
        """
        _check_names(self.cluster, str(variables["region"]))
        self._check_same(variables)
        terraform = self._terraform(variables)
        terraform.init()
        # Before anything is made: whatever becomes of the apply, `destroy` knows them.
        self._variables_file.write_text(json.dumps(dict(variables)) + "\n")
        terraform.apply()
        outputs = terraform.outputs()
        parse_base(outputs, "terraform output")
        self.file.write_text(json.dumps(outputs, indent=2) + "\n")

    def has_drift(self) -> bool:
        """Return whether `apply` would change anything."""
        terraform = self._terraform(self.variables())
        terraform.init()
        return terraform.has_drift()

    def check_unused(self) -> None:
        """Refuse while instances run: their network could not be ended under them, nor should it be.

        Raises:
            RefusedInput: Some run; they are named.
        """
        from tasks.providers.aws.place import AwsPlace  # boto3

        region = self.variables()["region"]
        endpoint = os.environ.get("AWS_ENDPOINT_URL", "")
        pool = AwsPool(cluster=self.cluster, region=region, endpoint_url=endpoint)
        if living := [holding.name for holding in AwsPlace(pool).find()]:
            raise RefusedInput(
                [
                    f"cluster {self.cluster!r} still has instances ({', '.join(living[:5])}):"
                    f" end their runs with `elastic-train reconcile --aws {self.cluster}@{region} --apply`"
                ]
            )

    def destroy(self) -> None:
        """End all that Terraform made. Raises ProviderError."""
        terraform = self._terraform(self.variables())
        terraform.init()
        terraform.destroy()
        for file in (self.file, self._variables_file):
            file.unlink(missing_ok=True)

    def _terraform(self, variables: Mapping[str, Any]) -> Terraform:
        if not (self.module / "main.tf").exists():
            raise RefusedInput([f"--module {str(self.module)!r}: there is no main.tf; give infra/terraform"])
        emulated = "AWS_ENDPOINT_URL" in os.environ
        return Terraform(
            self.module,
            self._directory,
            variables={**variables, **({"emulated": True, "expire_objects": False} if emulated else {})},
            listener=_Progress(self.tell),
        )

    def _check_same(self, wanted: Mapping[str, Any]) -> None:
        if not self._variables_file.exists():
            return
        there = self.variables()
        if problems := [
            f"{name}: is {wanted.get(name)!r}, but the base was made with {there.get(name)!r}:"
            " give that, or another --cluster"
            for name in _FIXED
            if wanted.get(name) != there.get(name)
        ]:
            raise RefusedInput(problems)


class _Progress:
    """A line for each thing that was made or ended, and for what takes its time."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        self._tell = tell
        self._planned = self._done = 0

    def __call__(self, event: TerraformEvent) -> None:
        if event.action == "read":
            return
        self._planned += event.kind == "planned_change"
        if event.kind == "apply_complete":
            self._done += 1
            self._tell(f"{self._done}/{self._planned} {event.message}")
        elif event.kind == "apply_progress" or event.severity == "warning":
            self._tell(f"{event.message} {event.detail}".rstrip())


def _check_names(cluster: str, region: str) -> None:
    try:
        AwsPool(cluster=cluster, region=region)
    except ValidationError as error:
        raise RefusedInput(
            [f"--{problem['loc'][-1]} {problem['input']!r}: {problem['msg']}" for problem in error.errors()]
        ) from error
