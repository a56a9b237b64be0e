"""Where moto 5.2.5 differs from AWS, and what is put in its place.

Each patch says what AWS does and where that is documented, and has a contract
test of its own. They touch moto's internals, so moto is pinned exactly.
"""

from __future__ import annotations

import base64
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from moto.core.responses import ActionResult
from moto.ec2.models.elastic_network_interfaces import NetworkInterface
from moto.ec2.models.instances import Instance, InstanceBackend, InstanceState, MetadataOptions, StateReason
from moto.ec2.models.launch_templates import LaunchTemplate, LaunchTemplateVersion
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.responses.fleets import Fleets
from moto.ec2.responses.general import General
from moto.ec2.responses.launch_templates import LaunchTemplates
from moto.ec2.responses.spot_instances import SpotInstances
from moto.ec2.utils import convert_tag_spec, random_fleet_id
from moto.efs.responses import EFSResponse

from tasks.emulator.market import SpotMarket
from tasks.providers.aws.fleet import Pool

_applied = threading.Lock()


def apply(market: SpotMarket, changed: Callable[[Instance], None]) -> None:
    """Patch moto in this process, once.

    Args:
        market: Where fleets take their capacity from.
        changed: Called for an instance that was launched or is to end.
    """
    if not _applied.acquire(blocking=False):
        raise RuntimeError("moto is patched already: one emulator a process")
    instant_fleets(market)
    launched_from_templates(changed)
    template_versions_build_on_their_source()
    template_tags_stay_with_the_template()
    instances_shut_down_before_they_end(changed)
    interfaces_end_with_their_instance()
    file_system_policies_can_be_deleted()
    rules_between_groups_have_descriptions()
    spot_prices_are_the_markets(market)
    consoles_show_what_the_machine_said()


def _replace(owner: type, name: str, function: object) -> None:
    """Put a function in a method's place; what is replaced is moto's, and not typed for it."""
    setattr(owner, name, function)


def instant_fleets(market: SpotMarket) -> None:
    """CreateFleet of type instant: capacity by pool, typed errors, everything from the template.

    AWS answers with the instances it could launch and an error a pool that it could not
    (docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateFleet.html); moto launches everything in
    the first override and ignores security groups, profile and metadata options of the template.
    """
    plain = Fleets.create_fleet

    def create_fleet(self: Fleets) -> ActionResult:
        if self._get_param("Type") != "instant":
            return plain(self)
        self.error_on_dryrun()
        config = self._get_param("LaunchTemplateConfigs", [])[0]
        capacity = self._get_param("TargetCapacitySpecification", {})
        fleet = _InstantFleet(
            backend=self.ec2_backend,
            template=config["LaunchTemplateSpecification"],
            purchase=capacity.get("DefaultTargetCapacityType", "on-demand"),
            tags=convert_tag_spec(self._get_param("TagSpecifications", [])),
        )
        fleet.fill(market, config.get("Overrides", []), int(capacity["TotalTargetCapacity"]))
        return ActionResult(fleet.answer())

    _replace(Fleets, "create_fleet", create_fleet)


@dataclass(slots=True, kw_only=True)
class _InstantFleet:
    """One fleet while it is filled."""

    backend: Any
    template: dict[str, Any]
    purchase: Any
    tags: dict[str, Any]
    fleet: str = field(default_factory=random_fleet_id)
    groups: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)

    def fill(self, market: SpotMarket, overrides: list[dict[str, Any]], wanted: int) -> None:
        """Launch what the market has, subnet by subnet."""
        for subnet in dict.fromkeys(override["SubnetId"] for override in overrides):
            zone = self.backend.get_subnet(subnet).availability_zone
            types = [override["InstanceType"] for override in overrides if override["SubnetId"] == subnet]
            taken, exhausted = market.take(types, zone, self.purchase, wanted)
            wanted -= len(taken)
            for kind in taken:
                self.groups.setdefault((kind, subnet), []).append(self._launch(kind, subnet))
            if wanted > 0:
                self.errors += [
                    _no_capacity(pool.instance_type, subnet, zone, self.purchase) for pool in exhausted
                ]

    def _launch(self, kind: str, subnet: str) -> str:
        reservation = self.backend.run_instances(
            None,
            1,
            None,
            [],
            is_instance_type_default=False,
            launch_template=self.template,
            associate_public_ip=None,
            region_name=self.backend.region_name,
            instance_type=kind,
            subnet_id=subnet,
            tags=dict(self.tags),
        )
        instance: Instance = reservation.instances[0]
        instance.lifecycle = "spot" if self.purchase == "spot" else None
        instance.add_tags({"aws:ec2:fleet-id": self.fleet})
        return instance.id

    def answer(self) -> dict[str, Any]:
        """Return CreateFleet's answer."""
        return {
            "FleetId": self.fleet,
            "Errors": self.errors,
            "Instances": [
                {
                    "Lifecycle": self.purchase,
                    "InstanceIds": ids,
                    "InstanceType": kind,
                    "LaunchTemplateAndOverrides": {
                        "LaunchTemplateSpecification": self.template,
                        "Overrides": {"InstanceType": kind, "SubnetId": subnet},
                    },
                }
                for (kind, subnet), ids in self.groups.items()
            ],
        }


def _no_capacity(kind: str, subnet: str, zone: str, purchase: str) -> dict[str, Any]:
    return {
        "LaunchTemplateAndOverrides": {"Overrides": {"InstanceType": kind, "SubnetId": subnet}},
        "Lifecycle": purchase,
        "ErrorCode": "InsufficientInstanceCapacity",
        "ErrorMessage": f"We currently do not have sufficient {kind} capacity in zone {zone}.",
    }


def launched_from_templates(changed: Callable[[Instance], None]) -> None:
    """An instance gets its template's profile, metadata options and shutdown behaviour, and no more disks.

    docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-launch-templates.html; moto ignores them, adds an
    8 GB volume beside the template's, and is `running` at once. An instance here is `pending` until its
    host has started.
    """
    plain = InstanceBackend.run_instances

    def run_instances(self: Any, image_id: Any, count: int, user_data: Any, names: Any, **kwargs: Any) -> Any:
        template = kwargs.get("launch_template")
        data = self._get_template_from_args(template).data if template else {}
        if data and "block_device_mappings" not in kwargs:
            kwargs["block_device_mappings"] = data.get("BlockDeviceMappings", [])
        reservation = plain(self, image_id, count, user_data, names, **kwargs)
        for instance in reservation.instances:
            instance._state = InstanceState("pending", 0)
            if data.get("MetadataOptions"):
                instance.metadata_options = MetadataOptions(data["MetadataOptions"])
            behaviour = data.get("InstanceInitiatedShutdownBehavior")
            if behaviour:
                instance.instance_initiated_shutdown_behavior = behaviour
            profile = data.get("IamInstanceProfile", {})
            if profile:
                self.associate_iam_instance_profile(instance.id, profile.get("Name"), profile.get("Arn"))
            changed(instance)
        return reservation

    _replace(InstanceBackend, "run_instances", run_instances)


def template_versions_build_on_their_source() -> None:
    """A version takes over what its source version has and it does not say itself.

    docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplateVersion.html (SourceVersion);
    moto ignores it. Versions can be deleted, too, and their numbers are not used again.
    """
    plain = LaunchTemplates.create_launch_template_version

    def create(self: LaunchTemplates) -> ActionResult:
        result = plain(self)
        source = self._get_param("SourceVersion")
        if source:
            name, key = self._get_param("LaunchTemplateName"), self._get_param("LaunchTemplateId")
            template = (
                self.ec2_backend.get_launch_template_by_name(name)
                if name
                else self.ec2_backend.get_launch_template(key)
            )
            version = template.latest_version()
            version.data = {**template.get_version(source).data, **version.data}
        return result

    def delete_versions(self: LaunchTemplates) -> ActionResult:
        template = self.ec2_backend.get_launch_template(self._get_param("LaunchTemplateId"))
        gone = [int(number) for number in self._get_param("Versions", [])]
        template.versions = [v for v in template.versions if v.number not in gone]
        return ActionResult(
            {
                "SuccessfullyDeletedLaunchTemplateVersions": [
                    {"LaunchTemplateId": template.id, "VersionNumber": number} for number in gone
                ],
                "UnsuccessfullyDeletedLaunchTemplateVersions": [],
            }
        )

    def create_version(self: Any, data: Any, description: str) -> LaunchTemplateVersion:
        self.highest = getattr(self, "highest", 0) + 1
        version = LaunchTemplateVersion(self, self.highest, data, description)
        self.versions.append(version)
        return version

    plain_get = LaunchTemplate.get_version

    def get_version(self: LaunchTemplate, number: Any) -> LaunchTemplateVersion:
        for version in self.versions:
            if str(version.number) == str(number):
                return version
        if str(number).lower() == "$default":
            return next(v for v in self.versions if v.number == self.default_version_number)
        return plain_get(self, "$latest" if str(number).lower() == "$latest" else len(self.versions) + 1)

    _replace(LaunchTemplates, "create_launch_template_version", create)
    _replace(LaunchTemplates, "delete_launch_template_versions", delete_versions)
    _replace(LaunchTemplate, "create_version", create_version)
    _replace(LaunchTemplate, "get_version", get_version)


def template_tags_stay_with_the_template() -> None:
    """Tags of a launch template itself are not tags of what it launches.

    docs.aws.amazon.com/AWSEC2/latest/APIReference/API_CreateLaunchTemplate.html (TagSpecifications);
    moto mixes them into the template's data, which Terraform sees as drift.
    """
    plain = LaunchTemplate.__init__

    def init(self: Any, backend: Any, name: str, data: Any, description: str, tag_spec: Any) -> None:
        specifications = [
            specification
            for specification in data.get("TagSpecifications", [])
            if specification.get("ResourceType") != "launch-template"
        ]
        data.pop("TagSpecifications", None)
        if specifications:
            data["TagSpecifications"] = specifications
        plain(self, backend, name, data, description, tag_spec)

    _replace(LaunchTemplate, "__init__", init)


def instances_shut_down_before_they_end(changed: Callable[[Instance], None]) -> None:
    """TerminateInstances leaves an instance `shutting-down` until its host has ended.

    docs.aws.amazon.com/AWSEC2/latest/UserGuide/ec2-instance-lifecycle.html; moto jumps to `terminated`.
    """
    plain = Instance.terminate

    def terminate(self: Any) -> InstanceState:
        previous = InstanceState(self._state.name, self._state.code)
        if self._state.name in ("terminated", "shutting-down"):
            return previous
        self._state = InstanceState("shutting-down", 32)
        self.state_reason = StateReason(
            "Client.UserInitiatedShutdown: User initiated shutdown", "Client.UserInitiatedShutdown"
        )
        changed(self)
        return previous

    def finish(self: Any, message: str) -> None:
        reason = StateReason(message, message.split(":")[0]) if message else self.state_reason
        plain(self)
        self.state_reason = reason

    _replace(Instance, "terminate", terminate)
    _replace(Instance, "finish_termination", finish)


def interfaces_end_with_their_instance() -> None:
    """An instance's primary network interface is deleted when the instance terminates.

    docs.aws.amazon.com/AWSEC2/latest/UserGuide/using-eni.html (termination behavior); moto keeps it
    `in-use`, which blocks the security group and the subnet.
    """
    plain = NetworkInterface.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain(self, *args, **kwargs)
        if self.description == "Primary network interface":
            self.delete_on_termination = True

    _replace(NetworkInterface, "__init__", init)


def file_system_policies_can_be_deleted() -> None:
    """DeleteFileSystemPolicy ends a policy.

    docs.aws.amazon.com/efs/latest/ug/API_DeleteFileSystemPolicy.html; moto answers HTTP 500, which
    Terraform repeats until somebody loses patience.
    """

    def delete(self: EFSResponse) -> tuple[str, dict[str, str]]:
        self.efs_backend.file_systems_by_id[self._get_param("FileSystemId")].file_system_policy = None
        return "{}", {"Content-Type": "application/json"}

    _replace(EFSResponse, "delete_file_system_policy", delete)


def rules_between_groups_have_descriptions() -> None:
    """A rule keeps its description also where its source is a security group.

    docs.aws.amazon.com/AWSEC2/latest/APIReference/API_SecurityGroupRule.html (Description); moto loses
    it, which Terraform sees as drift.
    """

    def description(self: Any) -> str | None:
        told: str | None = self.ip_range.get("Description") or self.source_group.get("Description")
        return told

    _replace(SecurityGroupRule, "description", property(description))


def spot_prices_are_the_markets(market: SpotMarket) -> None:
    """DescribeSpotPriceHistory tells what a pool costs now.

    docs.aws.amazon.com/AWSEC2/latest/APIReference/API_DescribeSpotPriceHistory.html; moto says 0.00001
    dollars for every pool, at a time in 2006.
    """

    def price(pool: Pool) -> dict[str, str]:
        return {
            "InstanceType": pool.instance_type,
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": f"{market.price_of(pool):.6f}",
            "AvailabilityZone": pool.zone,
            "Timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }

    def history(self: SpotInstances) -> ActionResult:
        offers = self.ec2_backend.describe_spot_price_history(
            self._get_param("InstanceTypes", []), self._filters_from_querystring()
        )
        told = [price(Pool(offer["InstanceType"], offer["Location"], "spot")) for offer in offers]
        return ActionResult({"SpotPriceHistory": told})

    _replace(SpotInstances, "describe_spot_price_history", history)


def consoles_show_what_the_machine_said() -> None:
    """GetConsoleOutput: what this machine's console showed, nothing while EC2 has nothing of it.

    AWS posts the console after an instance's state changed and keeps it for an hour after the end
    (docs.aws.amazon.com/AWSEC2/latest/APIReference/API_GetConsoleOutput.html); moto shows one fixed text.
    """

    def output(self: General) -> ActionResult:
        instance = self.ec2_backend.get_instance(self._get_param("InstanceId"))
        said: str = getattr(instance, "console", "")
        shown = {"Output": base64.b64encode(said.encode()).decode()} if said else {}
        return ActionResult({"InstanceId": instance.id, "Timestamp": datetime.now(UTC), **shown})

    _replace(General, "get_console_output", output)
