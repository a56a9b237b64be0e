"""What the Prefect UI shows of a run: progress, nodes and generations, pictures; one row each, for ever."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from elastic_core.ids import instance_of
from elastic_core.model.progress import HistoryEntry
from flows.audience import RunSnapshot
from flows.link import ArtifactContent
from flows.page import page_of
from tasks import report as reports


def artifacts_of(snapshot: RunSnapshot) -> Mapping[str, ArtifactContent]:
    """Return the artifacts of one moment by key."""
    run = snapshot.attempt.directory.run
    return {
        f"{run}-progress": _progress(snapshot),
        f"{run}-nodes": _nodes(snapshot),
        f"{run}-generations": _generations(snapshot),
        f"{run}-report": _page(snapshot),
    }


def _progress(snapshot: RunSnapshot) -> ArtifactContent:
    progress = snapshot.observation.progress
    done = progress.step / progress.total_steps if progress and progress.total_steps else 0.0
    said = f"step {progress.step} of {progress.total_steps}" if progress else "no step yet"
    return ArtifactContent("progress", round(100 * done, 1), said)


def _nodes(snapshot: RunSnapshot) -> ArtifactContent:
    seen = snapshot.observation
    members = {member.node_id for member in seen.history[-1].members} if seen.history else set()
    records = {instance_of(record.node_id): record for record in seen.nodes}
    rows = [
        {
            "node": instance.name,
            "state": instance.state,
            "phase": records[instance.name].phase if instance.name in records else "",
            "trains": "yes" if instance.name in records and records[instance.name].node_id in members else "",
            "detail": instance.detail or ("" if instance.exit_code is None else f"exit {instance.exit_code}"),
            "log": instance.log,
        }
        for instance in seen.instances
    ]
    return _table(rows, "Nodes of the run, ended ones too")


def _generations(snapshot: RunSnapshot) -> ArtifactContent:
    resumed = {resumption.generation: resumption for resumption in snapshot.observation.resumptions}
    rows = [_generation(entry, resumed) for entry in snapshot.observation.history]
    return _table(rows, "Who trained when, and why it changed")


def _generation(entry: HistoryEntry, resumed: Mapping[int, Any]) -> dict[str, Any]:
    generation = entry.generation
    resumption = resumed.get(generation.number)
    return {
        "generation": generation.number,
        "at (UTC)": datetime.fromtimestamp(entry.published_at, UTC).strftime("%H:%M:%S"),
        "cause": generation.cause,
        "nodes": generation.group_world_size,
        "world size": generation.world_size,
        "members": ", ".join(instance_of(member.node_id) for member in entry.members),
        "lost": "; ".join(f"{instance_of(node)}: {how}" for node, how in entry.lost.items()),
        "first step": resumption.step_resumed if resumption else "",
        "reason": generation.reason,
    }


def _table(rows: list[dict[str, Any]], description: str) -> ArtifactContent:
    return ArtifactContent("table", json.dumps(rows), description)


def _page(snapshot: RunSnapshot) -> ArtifactContent:
    """Return the report as a page: the final one once it is written, else how it would be now."""
    directory = snapshot.attempt.directory
    report = reports.read(directory.path) or reports.so_far(directory, snapshot.observation, now=time.time())
    page = page_of(report, directory.path, is_over=directory.report_file.exists())
    return ArtifactContent("markdown", page, "Report of the run")
