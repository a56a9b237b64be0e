"""What Prometheus reads of a run, and that the dashboard asks for nothing else."""

from __future__ import annotations

import json
import os
import re
import socket
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from elastic_core.errors import RefusedInput
from elastic_core.model.job import MetricsEndpoint
from elastic_core.model.membership import Cause
from flows.audience import RunSnapshot
from flows.metrics import CheckpointWaits, RunMetrics, exported
from tests.flows.test_live import ENTRY, GENERATION, progress, snapshot

DASHBOARD = Path(__file__).parents[2] / "infra" / "grafana" / "elastic-train.json"


def samples(text: str) -> dict[str, float]:
    """Return the value of each sample, by name and labels."""
    families = text_string_to_metric_families(text)
    return {
        each.name + "".join(f" {each.labels[label]}" for label in sorted(each.labels)): each.value
        for family in families
        for each in family.samples
    }


def scraped(shown: RunSnapshot) -> dict[str, float]:
    metrics = RunMetrics()
    registry = CollectorRegistry()
    registry.register(metrics)
    metrics.show(shown)
    return samples(generate_latest(registry).decode())


@pytest.fixture
def shown(tmp_path: Path) -> RunSnapshot:
    """A run in its second generation, with a checkpoint."""
    before = snapshot(tmp_path, progress(40))
    lost = replace(GENERATION, number=2, cause=Cause.FAILURE, restart_count=1, world_size=3)
    history = (ENTRY, replace(ENTRY, generation=lost, published_at=120.0))
    manifest = before.attempt.directory.path / "checkpoints" / "step-00000020-a1-g1" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.touch()
    os.utime(manifest, (1000.0, 1000.0))
    return replace(before, observation=replace(before.observation, history=history, current=lost))


def test_figures_are_those_of_the_run_that_was_shown_last(shown: RunSnapshot) -> None:
    found = scraped(shown)
    assert found["elastic_run_info 1 digits digits-1"] == 1
    assert (found["elastic_steps_total"], found["elastic_samples_total"]) == (40, 40 * 64)
    assert found["elastic_samples_per_second"] == 1234.4
    assert found["elastic_workers"] == 3
    assert found["elastic_generations_total start"] == found["elastic_generations_total failure"] == 1
    assert (found["elastic_faults_total failure"], found["elastic_faults_total loss"]) == (1, 0)
    assert found["elastic_restarts_total"] == 1
    assert found["elastic_checkpoint_age_seconds"] > 1e6


def test_the_ledgers_classes_add_up_to_the_time_and_the_goodput_is_a_share_of_it(shown: RunSnapshot) -> None:
    found = scraped(shown)
    classes = {name: value for name, value in found.items() if name.startswith("elastic_ledger_seconds")}
    assert len(classes) == 10
    share = classes["elastic_ledger_seconds train"] / sum(classes.values())
    assert found["elastic_goodput_ratio"] == pytest.approx(share)


def test_waits_for_checkpoints_are_added_up_line_by_line_and_half_a_line_waits(tmp_path: Path) -> None:
    file, waits = tmp_path / "metrics.jsonl", CheckpointWaits()
    assert waits.read(file) == 0
    file.write_text('{"checkpoint_s": 0.5}\nno json\n{"step": 1}\n{"checkpoint_s": 0.2')
    assert waits.read(file) == 0.5
    with file.open("a") as stream:
        stream.write('5}\n{"checkpoint_s": null}\n')
    assert waits.read(file) == waits.read(file) == 0.75


def test_each_panel_of_the_dashboard_asks_for_metrics_that_there_are(shown: RunSnapshot) -> None:
    there = {name.split(" ")[0] for name in scraped(shown)} | {"elastic_accuracy_ratio"}
    dashboard = json.loads(DASHBOARD.read_text())
    panels = {
        panel["title"]: set(re.findall(r"\belastic_\w+", json.dumps(panel["targets"])))
        for panel in dashboard["panels"]
    }
    assert len(panels) == 12
    assert all(len(asked) >= 2 and asked <= there for asked in panels.values())
    asked = set().union(*panels.values())
    assert there - asked == {"elastic_workers", "elastic_planned_steps", "elastic_samples_per_second"}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_run_answers_scrapes_while_it_goes_on_and_not_afterwards(shown: RunSnapshot) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with exported(MetricsEndpoint(port=port)) as metrics:
        metrics.show(shown)
        assert samples(urllib.request.urlopen(url, timeout=10).read().decode())["elastic_steps_total"] == 40
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=10)


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with (
            pytest.raises(RefusedInput, match=rf"^metrics\.port: 127\.0\.0\.1:{port} cannot be used"),
            exported(MetricsEndpoint(port=port)),
        ):
            pass


def test_without_a_port_nothing_listens_and_showing_costs_nothing(shown: RunSnapshot) -> None:
    with exported(MetricsEndpoint()) as metrics:
        metrics.show(shown)
