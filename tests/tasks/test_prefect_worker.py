"""`make up`: a server that asks for a password, all deployments, and a worker; `make down` ends it."""

from __future__ import annotations

import base64
import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_core.errors import RefusedInput
from tasks import prefect_server, prefect_worker
from tasks.process import wait_ended

PROJECT = Path(__file__).parents[2] / "prefect.yaml"


@pytest.mark.case("X07")
def test_a_server_that_others_can_reach_is_refused_without_a_password(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prefect_server.AUTH, raising=False)
    with pytest.raises(RefusedInput, match=r"^--host: 0\.0\.0\.0 can be reached by others: set"):
        prefect_server.begin(tmp_path, host="0.0.0.0")
    assert prefect_server.status(tmp_path) is None


def test_a_project_that_is_not_there_is_told(tmp_path: Path) -> None:
    record = prefect_server.ServerRecord(
        process=prefect_server.ProcessIdentity(pid=1, start_ticks=1, boot="x"), port=4200
    )
    with pytest.raises(prefect_worker.DeployFailed, match="deploy from the checkout"):
        prefect_worker.deploy_all(record, tmp_path, project=tmp_path / "prefect.yaml")


def _ask(url: str, login: str = "", body: object = None) -> list[dict[str, Any]]:
    data = json.dumps({} if body is None else body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    if login:
        request.add_header("Authorization", f"Basic {base64.b64encode(login.encode()).decode()}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: list[dict[str, Any]] = json.loads(answer.read() or b"[]")
    return found


def _wanted(run: str, target: int) -> dict[str, Any]:
    """Return the event that asks for another size of a run."""
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "elastic.rescale.wanted",
        "resource": {"prefect.resource.id": f"elastic.run.{run}", "prefect.resource.name": run},
        "related": [],
        "payload": {"run": run, "wish": {"target": target}},
    }


def _run_by_event(api: str, event: dict[str, Any]) -> dict[str, Any]:
    """Emit an event and return the parameters of the flow run that it makes."""
    _ask(f"{api}/events", "admin:secret", [event])
    until = time.monotonic() + 60
    while time.monotonic() < until:
        runs = _ask(f"{api}/flow_runs/filter", "admin:secret")
        made = [run["parameters"] for run in runs if "wish" in run["parameters"]]
        if made:
            parameters: dict[str, Any] = made[0]
            return parameters
        threading.Event().wait(0.5)  # there is nothing to be woken by: the server is asked again
    raise AssertionError("the event made no flow run")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.case("X07")
def test_all_deployments_are_on_a_server_that_asks_for_a_password_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(prefect_server.AUTH, "admin:secret")
    record = prefect_server.begin(tmp_path)
    try:
        prefect_server.wait_healthy(record, tmp_path)
        names = prefect_worker.deploy_all(record, tmp_path, project=PROJECT)
        automations = {each["name"] for each in _ask(f"{record.api}/automations/filter", "admin:secret")}
        assert automations == {
            "elastic-reconcile after a crash",
            "elastic-reconcile after a silence",
            "elastic-rescale on event",
        }
        parameters = _run_by_event(record.api, _wanted("digits-1", 3))
        assert (parameters["run"], parameters["wish"]) == ("digits-1", {"target": 3})
        worker = prefect_worker.begin(record, tmp_path)
        assert prefect_worker.begin(record, tmp_path) == worker
        url = f"{record.api}/deployments/filter"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            _ask(url)
        deployed = {each["name"] for each in _ask(url, "admin:secret")}
        assert deployed == {each["name"] for each in yaml.safe_load(PROJECT.read_text())["deployments"]}
        assert names == tuple(f"{name}/{name}" for name in (name.split("/")[0] for name in names))
    finally:
        stopped = prefect_worker.stop(tmp_path)
        prefect_server.stop(tmp_path)
    assert stopped == worker
    assert wait_ended([worker, record.process], 0) == set()
