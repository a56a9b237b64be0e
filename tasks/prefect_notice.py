"""Who is told when trainings fail again and again: an automation of the server, with a block of the user's.

One failure is in the UI, and most are mended by the same command. Several within an hour mean that
something is wrong with machines, data or code, and that money is spent on it.
"""

from __future__ import annotations

import base64
import json
import os
import urllib.error
import urllib.request
from typing import Any, Final

from elastic_core.errors import ElasticError, RefusedInput
from tasks.prefect_server import AUTH, ServerRecord

NAME: Final = "elastic-train fails repeatedly"
FAILURES: Final = 3
WITHIN_S: Final = 3600
_TIMEOUT_S: Final = 30.0


class ServerRefused(ElasticError):
    """The server did not take what it was told."""


def notify_on_failures(
    record: ServerRecord, block: str, *, failures: int = FAILURES, within_s: int = WITHIN_S
) -> str:
    """Let a notification block be used when so many flow runs fail; return what was set up. May be repeated.

    Args:
        record: The server.
        block: A block that somebody saved there, `type/name`: "slack-webhook/team".
        failures: Flow runs of `elastic-train` that fail or crash…
        within_s: …within so many seconds.

    Raises:
        RefusedInput: There is no such block.
        ServerRefused: The server did not take it.
    """
    kind, _, name = block.partition("/")
    try:
        found = _call(record, "GET", f"block_types/slug/{kind}/block_documents/name/{name}")
    except urllib.error.HTTPError as error:
        if error.code != 404:
            raise ServerRefused(f"the server answered {error.code} when asked for {block!r}") from error
        told = "save one in the UI under Blocks, and give its type/name, like slack-webhook/team"
        raise RefusedInput([f"--notify: {block!r} is no block of this server; {told}"]) from None
    wanted = _automation(found["id"], failures, within_s)
    try:
        known = _call(record, "POST", "automations/filter", {"automations": {"name": {"any_": [NAME]}}})
        if known:
            _call(record, "PUT", f"automations/{known[0]['id']}", wanted)
        else:
            _call(record, "POST", "automations/", wanted)
    except urllib.error.HTTPError as error:
        raise ServerRefused(
            f"the server refused the automation {NAME!r}: {error.read().decode()[:500]}"
        ) from error
    return f"{block} is told when {failures} flow runs fail within {within_s // 60} minutes"


def _automation(block: str, failures: int, within_s: int) -> dict[str, Any]:
    return {
        "name": NAME,
        "description": f"{failures} failed or crashed flow runs within {within_s} s",
        "enabled": True,
        "trigger": {
            "type": "event",
            "posture": "Reactive",
            "match_related": {"prefect.resource.role": "flow", "prefect.resource.name": "elastic-train"},
            "expect": ["prefect.flow-run.Failed", "prefect.flow-run.Crashed"],
            "threshold": failures,
            "within": within_s,
        },
        "actions": [
            {
                "type": "send-notification",
                "block_document_id": block,
                "subject": f"elastic-train: {failures} flow runs failed",
                "body": "The last one: {{ flow_run.name }} ({{ flow_run.state.message }}). "
                "Look at its report's first failure: {{ flow_run|ui_url }}",
            }
        ],
    }


def _call(record: ServerRecord, method: str, path: str, body: object = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if login := os.environ.get(AUTH):
        headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
    url = f"{record.api}/{path}"
    request = urllib.request.Request(url, data=data, headers=headers, method=method)  # noqa: S310 - our own http URL
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310 - our own http URL
        return json.loads(answer.read() or b"null")
