"""Checkpoints on S3, against moto's server."""

from __future__ import annotations

from collections.abc import Iterator

import boto3
import fsspec
import pytest
from moto.server import ThreadedMotoServer
from structlog.testing import capture_logs

from elastic_core.trainer.checkpoint import StaleGeneration, Token
from elastic_core.trainer.checkpoint_url import open_checkpoints
from tasks.storage.s3 import BucketFiles
from tests.elastic_core.trainer.test_checkpoint import manifest_at, state_at
from tests.elastic_core.trainer.test_checkpoint_url import newest_step, write

pytestmark = [pytest.mark.aws, pytest.mark.slow]


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def url(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    settings = {
        "AWS_ENDPOINT_URL_S3": endpoint,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-west-2",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    fsspec.register_implementation("s3", BucketFiles, clobber=True)
    BucketFiles.clear_instance_cache()
    client = boto3.client("s3")
    client.create_bucket(Bucket="checkpoints", CreateBucketConfiguration={"LocationConstraint": "us-west-2"})
    yield "s3://checkpoints/team/run"
    for entry in client.list_objects_v2(Bucket="checkpoints").get("Contents", ()):
        client.delete_object(Bucket="checkpoints", Key=entry["Key"])
    client.delete_bucket(Bucket="checkpoints")


def test_checkpoints_on_s3_are_written_read_fenced_and_pruned(url: str) -> None:
    checkpoints = open_checkpoints(url, keep=2)
    assert checkpoints.newest() is None
    write(checkpoints, 10, 20, 30)
    assert newest_step(open_checkpoints(url)) == 30
    keys = [entry["Key"] for entry in boto3.client("s3").list_objects_v2(Bucket="checkpoints")["Contents"]]
    assert sorted(keys) == [
        "team/run/fence/00001-00000001",
        *(
            f"team/run/step-000000{step}-a1-g1/{name}"
            for step in (20, 30)
            for name in ("manifest.json", "state.pt")
        ),
    ]
    open_checkpoints(url).claim(Token(1, 2), "new")
    with pytest.raises(StaleGeneration):
        checkpoints.write(state_at(40), manifest_at(40))
    with pytest.raises(StaleGeneration, match="was claimed by new"):
        open_checkpoints(url).claim(Token(1, 2), "third")


def test_a_damaged_checkpoint_on_s3_is_set_aside(url: str) -> None:
    write(open_checkpoints(url), 10, 20)
    boto3.client("s3").put_object(
        Bucket="checkpoints", Key="team/run/step-00000020-a1-g1/state.pt", Body=b"half"
    )
    with capture_logs() as logs:
        assert newest_step(open_checkpoints(url)) == 10
    assert "its manifest says" in logs[0]["why"]
    assert logs[0]["kept"] == "damaged-step-00000020-a1-g1"


def test_a_bucket_that_is_not_there_holds_nothing_and_cannot_be_claimed(url: str) -> None:
    missing = open_checkpoints("s3://no-such-bucket/run")
    assert missing.newest() is None
    with pytest.raises(FileNotFoundError, match="NoSuchBucket"):
        missing.claim(Token(1, 1), "a")
