"""On a real account, by choice: two of the smallest nodes for some minutes, for a few cents.

Run it where the flow would run (docs/aws.md): in the cluster's network, with its file system mounted.

    ELASTIC_AWS_SMOKE=1 ELASTIC_AWS_BASE=.elastic/base/elastic/base.json ELASTIC_AWS_IMAGE=…@sha256:… \
        python -m pytest tests/flows/test_train_aws_smoke.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import boto3
import pytest

from elastic_core.model.job import AwsPool
from tasks.providers.aws.base import read_base
from tasks.providers.aws.place import AwsPlace

pytestmark = [
    pytest.mark.aws,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(
        os.environ.get("ELASTIC_AWS_SMOKE") != "1",
        reason="costs money on a real account: set ELASTIC_AWS_SMOKE=1, see docs/aws.md",
    ),
]

QUARTER_OF_AN_HOUR = 0.25


@pytest.fixture(autouse=True)
def account() -> None:
    if boto3.session.Session().get_credentials() is None:
        pytest.skip("ELASTIC_AWS_SMOKE=1, but there are no AWS credentials: `aws configure`, or a role")
    for name in ("ELASTIC_AWS_BASE", "ELASTIC_AWS_IMAGE"):
        if not os.environ.get(name):
            pytest.fail(f"{name} is not set: see the head of this file")


def test_digits_train_on_two_small_spot_nodes_and_nothing_is_left() -> None:
    base = read_base(Path(os.environ["ELASTIC_AWS_BASE"]))
    mount = os.environ.get("ELASTIC_AWS_MOUNT", "/mnt/elastic")
    pool = {
        "kind": "aws",
        "cluster": base.cluster,
        "region": base.region,
        "base": os.environ["ELASTIC_AWS_BASE"],
        "mount": mount,
        "image": os.environ["ELASTIC_AWS_IMAGE"],
        "instance_types": ["t3.medium", "t3a.medium"],
        "etcd_instance_type": "t3.micro",
        "shm_gib": 1,
        "max_hours": QUARTER_OF_AN_HOUR,
        "budget_usd": 0.2,
    }
    command = [sys.executable, "-m", "flows.cli", "train", "examples/digits.yaml", "--runs", f"{mount}/runs"]
    given = [f"--set=pool.{key}={json.dumps(value)}" for key, value in pool.items()]
    done = subprocess.run([*command, "--set=name=smoke", *given], check=False)
    assert done.returncode == 0
    reports = sorted(Path(mount, "runs").glob("smoke-*/report.json"), key=lambda path: path.stat().st_mtime)
    report = json.loads(reports[-1].read_text())
    assert (report["samples_missed"], report["samples_repeated"]) == (0, 0)
    assert 0 < report["cost_usd"] < 0.2
    found = AwsPlace(AwsPool(cluster=base.cluster, region=base.region)).find()
    assert [holding.name for holding in found if holding.run == report["run"]] == []
