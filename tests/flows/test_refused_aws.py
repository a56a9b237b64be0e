"""What a job file says wrongly costs nothing: no call reaches AWS."""

import sys
from pathlib import Path

import pytest

from flows import cli
from tasks.emulator.account import write_base
from tests.tasks.emulator.account import Account, account, cloud

__all__ = ["account", "cloud"]

pytestmark = [pytest.mark.aws, pytest.mark.slow]


@pytest.mark.case("A01")
@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("nodes.min=5", "nodes: min is 5 and max is 3: raise max or lower min"),
        ("pool.budget_usd=-1", "pool.budget_usd"),
        ("pool.market=cheap", "pool.market"),
    ],
)
def test_a_job_that_cannot_be_is_refused_before_the_first_call(
    account: Account,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    setting: str,
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_base(account.base, tmp_path / "base.json")
    Path("train.py").write_text("")
    Path("job.yaml").write_text("name: digits\ntraining: {kind: script, script: train.py}\n")
    pool = {"kind": "aws", "cluster": "demo", "region": "us-west-2", "base": "base.json"}
    given = [f"pool.{key}={value}" for key, value in {**pool, "endpoint_url": account.cloud.url}.items()]
    settings = [word for each in (*given, "nodes.max=3", setting) for word in ("--set", each)]
    account.cloud.door.calls.clear()
    monkeypatch.setattr(sys, "argv", ["elastic-train", "train", "job.yaml", *settings])
    monkeypatch.setenv("PREFECT_HOME", "unused")
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == 2
    assert told in capsys.readouterr().err
    assert dict(account.cloud.door.calls) == {}
    assert not Path("runs").exists()
