"""Orphaned instances are found by tag; what another machine may own is left alone."""

import time
from pathlib import Path

import pytest

from elastic_core.model.job import JobSpec
from tasks.emulator.frontdoor import Fault
from tasks.providers.aws.account import examine_account
from tasks.providers.aws.place import AwsPlace
from tasks.reconcile import Scope, reconcile, teardown
from tasks.runs import RunDirectory
from tests.tasks.emulator.account import Account, account, cloud
from tests.tasks.providers.aws.test_provider import RUN, etcd, provider, wanted

__all__ = ["account", "cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow]


def a_run(runs: Path) -> RunDirectory:
    directory = RunDirectory(runs / RUN)
    directory.path.mkdir(parents=True)
    directory.begin_attempt(JobSpec(), now=time.time())
    return directory


def versions(account: Account) -> list[int]:
    template = account.base.launch_template
    told = account.client("ec2").describe_launch_template_versions(LaunchTemplateId=template)
    return sorted(version["VersionNumber"] for version in told["LaunchTemplateVersions"])


def test_only_what_expired_or_what_a_run_here_gave_up_is_ended(account: Account, tmp_path: Path) -> None:
    provider(account).launch(wanted(2))
    scope = Scope(runs=str(tmp_path), local=False, docker=False, aws=(account.pool(),))
    foreign = reconcile(scope, apply=True)
    assert {one.verdict.reason for one in foreign.findings} == {
        "its run is not known here: another machine's"
    }
    assert len(account.living("running")) == 2

    assert versions(account) == [1, 2]

    a_run(tmp_path).report_file.write_text('{"state": "failed"}')
    assert reconcile(scope, apply=True).headline() == "3 found, 3 without an owner, 3 ended"
    assert account.living("running") == []
    assert versions(account) == [1], "the base's own version stays"


def test_an_instance_whose_time_is_over_is_an_orphan_wherever_it_came_from(account: Account) -> None:
    provider(account, max_hours=1).launch(wanted())
    in_a_day = AwsPlace(account.pool(), clock=lambda: time.time() + 24 * 3600)
    assert [holding.has_expired for holding in AwsPlace(account.pool()).find()] == [False, False]
    assert [(one.kind, one.has_expired) for one in in_a_day.find()] == [
        ("instance", True),
        ("template version", False),
    ]


def test_a_teardown_ends_the_instances_of_its_run_and_no_others(account: Account, tmp_path: Path) -> None:
    provider(account).launch(wanted())
    (mine,) = account.living("running")
    provider(account).launch(wanted(run="other-1"))  # type: ignore[arg-type]
    scope = Scope(runs=str(tmp_path), local=False, docker=False, aws=(account.pool(),))
    assert teardown(RUN, scope).headline() == "2 found, 2 without an owner, 2 ended"
    assert mine not in account.living("running")
    assert len(account.living("running")) == 1


@pytest.mark.case("A04")
def test_an_orphan_that_could_not_be_ended_is_told_and_nodes_end_before_etcd(
    account: Account, tmp_path: Path
) -> None:
    (node,) = [one.name for one in provider(account).launch(wanted()).launched]
    etcd(account, tmp_path)
    place = AwsPlace(account.pool())
    account.cloud.door.inject(Fault(action="TerminateInstances", code="UnauthorizedOperation", status=403))
    left = place.remove(sorted(place.find(), key=lambda holding: holding.name == node))  # etcd is first
    assert set(left) == {node}
    assert left[node].startswith("TerminateInstances: UnauthorizedOperation")
    assert account.living() == [node]


def test_an_account_is_examined_with_what_is_missing(
    account: Account, monkeypatch: pytest.MonkeyPatch
) -> None:
    there = {name: said for name, said, _ in examine_account(account.pool())}
    assert there["base"] == "cluster 'demo' is there"
    pool = account.pool().model_copy(update={"cluster": "other"})
    told = {name: (said, remedy) for name, said, remedy in examine_account(pool)}
    assert told["credentials"][1] == ""
    assert told["region"] == ("us-west-2; the environment's us-east-1 is not used", "")
    assert told["base"] == (
        "there is no cluster 'other' in us-west-2",
        "make it: `elastic-train base apply`",
    )
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    ((name, _, remedy),) = examine_account(account.pool())
    assert (name, "aws configure" in remedy) == ("credentials", True)
