"""The base, made by the real Terraform and the real provider on the emulated account."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.errors import InvalidRequest, RefusedInput
from tasks.cluster_base import MODULE, ClusterBase
from tasks.emulator.account import CREDENTIALS
from tasks.emulator.cloud import Cloud
from tasks.emulator.frontdoor import Fault
from tasks.process import with_argument
from tasks.providers.aws.base import Base, read_base
from tests.tasks.emulator.account import REGION, ZONES, Account, cloud

__all__ = ["cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow, pytest.mark.timeout(400)]

VARIABLES = {"cluster": "demo", "region": REGION, "zones": list(ZONES)}
WORLD = {"0.0.0.0/0", "::/0"}


@pytest.fixture
def account(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Account:
    """An account with nothing in it, and an empty directory."""
    for name, value in {
        "AWS_ENDPOINT_URL": cloud.url,
        "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    cloud.reset()
    cloud.listener = None
    return Account(cloud, Base.model_construct())


def base(tell: Callable[[str], None] = print) -> ClusterBase:
    return ClusterBase(cluster="demo", tell=tell)


def networks(account: Account) -> list[str]:
    filters = [{"Name": "tag:elastic:cluster", "Values": ["demo"]}]
    return [vpc["VpcId"] for vpc in account.client("ec2").describe_vpcs(Filters=filters)["Vpcs"]]


def made() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield type and attributes of all that the state holds."""
    state = json.loads(Path(".elastic/base/demo/terraform.tfstate").read_text())
    for resource in state["resources"]:
        for instance in resource["instances"]:
            if resource["mode"] == "managed":
                yield resource["type"], instance["attributes"]


def statements(policy: str) -> Iterator[tuple[dict[str, Any], set[str]]]:
    for statement in json.loads(policy)["Statement"]:
        actions = statement["Action"]
        yield statement, {actions} if isinstance(actions, str) else set(actions)


def of_type(kind: str) -> list[dict[str, Any]]:
    return [attributes for found, attributes in made() if found == kind]


@pytest.mark.case("A14")
@pytest.mark.case("A15")
@pytest.mark.case("X03")
@pytest.mark.case("X05")
def test_a_base_is_made_without_drift_is_safe_and_ends_without_a_rest(account: Account) -> None:
    told: list[str] = []
    subject = base(told.append)
    subject.apply(VARIABLES)
    assert told[-1].startswith(f"{len(list(made()))}/{len(list(made()))} ")
    assert subject.has_drift() is False
    assert set(read_base(subject.file).subnets) == set(ZONES)

    _check_network()
    _check_policies()
    _check_storage()
    assert of_type("aws_autoscaling_group") == []  # so that nothing waits for a group's capacity

    # Instances that were just terminated hold their group for a while.
    account.cloud.door.inject(Fault(action="DeleteSecurityGroup", code="DependencyViolation", times=2))
    subject.destroy()
    assert len(account.cloud.door.fired) == 2
    assert networks(account) == []
    assert account.client("efs").describe_file_systems()["FileSystems"] == []
    with pytest.raises(RefusedInput, match="no base was made from here; known: none"):
        subject.has_drift()


def _check_network() -> None:
    rules = of_type("aws_vpc_security_group_ingress_rule")
    assert [rule for rule in rules if {rule["cidr_ipv4"], rule["cidr_ipv6"]} & WORLD] == []
    assert all(rule["referenced_security_group_id"] for rule in rules)
    groups = {group["name"]: group["id"] for group in of_type("aws_security_group")}
    clients = [rule for rule in rules if rule["from_port"] == 2379]
    assert [(rule["security_group_id"], rule["referenced_security_group_id"]) for rule in clients] == [
        (groups["demo-etcd"], groups["demo-node"])
    ]
    assert 22 not in {rule["from_port"] for rule in rules}


def _check_policies() -> None:
    (node,) = of_type("aws_iam_role_policy")
    (bucket,) = of_type("aws_s3_bucket")
    for statement, actions in statements(node["policy"]):
        assert not any("*" in action or action.startswith(("ec2:", "iam:")) for action in actions)
        if any(action.startswith("s3:") for action in actions):
            resource = statement["Resource"]
            assert resource.startswith(bucket["arn"])
    (controller,) = of_type("aws_iam_policy")
    for statement, actions in statements(controller["policy"]):
        assert not any("*" in action for action in actions)
        if actions & {"ec2:TerminateInstances", "ec2:DeleteLaunchTemplateVersions"}:
            assert statement["Condition"]["StringEquals"] == {"aws:ResourceTag/elastic:cluster": "demo"}
    mounts = [
        actions
        for _, actions in statements(controller["policy"])
        if "elasticfilesystem:ClientMount" in actions
    ]
    assert mounts == [{"elasticfilesystem:ClientMount", "elasticfilesystem:ClientWrite"}]


def _check_storage() -> None:
    (access,) = of_type("aws_efs_access_point")
    (directory,) = access["root_directory"]
    (creation,) = directory["creation_info"]
    assert (access["posix_user"][0]["uid"], creation["permissions"]) == (1000, "0750")
    assert of_type("aws_efs_file_system")[0]["encrypted"] is True
    (privacy,) = of_type("aws_s3_bucket_public_access_block")
    assert all(
        privacy[name] for name in ("block_public_acls", "block_public_policy", "restrict_public_buckets")
    )


def test_an_apply_that_is_interrupted_finishes_what_it_makes_and_the_next_makes_nothing_twice(
    account: Account,
) -> None:
    told: list[str] = []

    def interrupt(line: str) -> None:
        told.append(line)
        if "aws_vpc.this: Creation complete" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base(interrupt).apply(VARIABLES)
    at = next(
        number for number, line in enumerate(told) if line.startswith("interrupted: Terraform finishes")
    )
    assert "aws_vpc.this" in told[at - 1]
    total = len(list(made()))
    assert told[-1].startswith(f"{total}/{total} ")
    (network,) = networks(account)
    assert not Path(".elastic/base/demo/base.json").exists()

    made_before = account.cloud.door.calls["CreateSubnet"]
    subject = base()
    subject.apply(VARIABLES)
    assert (networks(account), account.cloud.door.calls["CreateSubnet"]) == ([network], made_before)
    subject.destroy()
    assert networks(account) == []


def test_a_second_interruption_cancels_and_leaves_a_state_and_no_process(account: Account) -> None:
    def interrupt(line: str) -> None:
        if "aws_vpc.this: Creation complete" in line or line.startswith("interrupted"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base(interrupt).apply(VARIABLES)
    assert len(of_type("aws_vpc")) == 1
    assert with_argument(f"-chdir={MODULE}") == []


def test_an_apply_that_fails_says_what_aws_said_and_can_be_destroyed(account: Account) -> None:
    account.cloud.door.inject(
        Fault(action="CreateVpcEndpoint", code="VpcEndpointLimitExceeded", message="one too many")
    )
    subject = base()
    with pytest.raises(InvalidRequest, match=r"terraform apply failed: .*one too many"):
        subject.apply(VARIABLES)
    assert len(networks(account)) == 1
    subject.destroy()
    assert networks(account) == []


def test_a_base_is_not_moved_to_another_region_nor_file_system(account: Account) -> None:
    Path(".elastic/base/demo").mkdir(parents=True)
    Path(".elastic/base/demo/variables.json").write_text(json.dumps(VARIABLES))
    with pytest.raises(RefusedInput) as caught:
        base().apply({**VARIABLES, "region": "eu-west-1", "file_system_id": "fs-1"})
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["region", "file_system_id"]


def test_a_bad_name_is_refused_before_terraform_starts(account: Account) -> None:
    with pytest.raises(RefusedInput, match="--region 'nowhere'"):
        base().apply({**VARIABLES, "region": "nowhere"})
    assert not Path(".elastic").exists()
