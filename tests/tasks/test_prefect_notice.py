"""Three failed flow runs within the hour are told to a block of the user's, by a real server."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest

from elastic_core.errors import RefusedInput
from tasks import prefect_server
from tasks.prefect_notice import NAME, notify_on_failures
from tests.tasks.test_prefect_worker import _ask

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[prefect_server.ServerRecord]:
    monkeypatch.delenv(prefect_server.AUTH, raising=False)
    begun = prefect_server.begin(tmp_path)
    prefect_server.wait_healthy(begun, tmp_path)
    yield begun
    prefect_server.stop(tmp_path)


@pytest.fixture
def hook() -> Iterator[tuple[str, Queue[dict[str, Any]]]]:
    heard: Queue[dict[str, Any]] = Queue()

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", heard
    server.shutdown()
    server.server_close()


def save_block(record: prefect_server.ServerRecord, url: str) -> None:
    from prefect.blocks.notifications import CustomWebhookNotificationBlock
    from prefect.settings import PREFECT_API_URL, temporary_settings

    block = CustomWebhookNotificationBlock(
        name="team", url=url, json_data={"subject": "{{subject}}", "body": "{{body}}"}
    )
    with temporary_settings({PREFECT_API_URL: record.api}):
        block.save("team")


def failed(flow: str, state: str = "Failed") -> dict[str, Any]:
    """Return the event of a flow run that failed."""
    run = str(uuid.uuid4())
    return {
        "id": str(uuid.uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": f"prefect.flow-run.{state}",
        "resource": {"prefect.resource.id": f"prefect.flow-run.{run}", "prefect.resource.name": "brave-owl"},
        "related": [
            {
                "prefect.resource.id": f"prefect.flow.{uuid.uuid4()}",
                "prefect.resource.role": "flow",
                "prefect.resource.name": flow,
            }
        ],
        "payload": {},
    }


def test_the_third_failure_is_told_and_those_of_other_flows_do_not_count(
    record: prefect_server.ServerRecord, hook: tuple[str, Queue[dict[str, Any]]]
) -> None:
    url, heard = hook
    with pytest.raises(RefusedInput, match="--notify: 'custom-webhook/team' is no block of this server"):
        notify_on_failures(record, "custom-webhook/team")
    save_block(record, url)
    for _ in range(2):  # again is no second automation
        told = notify_on_failures(record, "custom-webhook/team")
    assert told == "custom-webhook/team is told when 3 flow runs fail within 60 minutes"
    automations = _ask(f"{record.api}/automations/filter")
    assert [each["name"] for each in automations] == [NAME]

    _ask(f"{record.api}/events", body=[failed("elastic-train"), failed("mine"), failed("mine")])
    with pytest.raises(Empty):
        heard.get(timeout=5)
    _ask(f"{record.api}/events", body=[failed("elastic-train", "Crashed"), failed("elastic-train")])
    said = heard.get(timeout=60)
    assert said["subject"] == "elastic-train: 3 flow runs failed"
