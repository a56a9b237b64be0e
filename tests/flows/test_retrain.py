"""Retraining against real agents, a real etcd and a real Prefect server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, ElasticOptions, JobSpec, NodeBounds
from elastic_core.quality.gate import Gate
from flows.retraining import parse_gate
from tasks.registry.choice import DirectoryChoice
from tasks.registry.directory import DirectoryRegistry
from tasks.runs import all_runs
from tests.elastic_core.trainer.classy.images import picture_config


def retrain(job: JobSpec, place: Path, **options: Any) -> Any:
    from flows.retrain import elastic_retrain

    registry = DirectoryChoice(path=str(place / "models"))
    return elastic_retrain(job, registry=registry, runs=str(place / "runs"), return_state=True, **options)


def comparison_artifacts() -> list[str]:
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        found = client.read_artifacts()
    return [str(each.data) for each in found if each.key == "pictures-comparison"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("prefect_server")
def test_new_data_are_trained_from_the_champion_on_and_only_what_passes_the_gate_is_promoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = picture_config(tmp_path / "data", "ant", "bee")
    job = JobSpec(
        name="pictures",
        nodes=NodeBounds(min=1, max=1, target=1),
        training=ClassyTraining(config=config, elastic=ElasticOptions(global_batch=8, virtual_shards=1)),
    )
    registry = DirectoryRegistry(tmp_path / "models", "pictures")

    first = retrain(job, tmp_path)
    assert (first.type, first.name) == ("COMPLETED", "Promoted")
    assert registry.champion() == 1
    assert (registry.fetch(1) / "comparison.html").read_text().startswith("<!doctype html>")

    again = retrain(job, tmp_path)
    assert (again.type, again.name) == ("COMPLETED", "NothingNew")
    assert again.message == "nothing is new since version 1: nothing is trained"
    assert len(all_runs(tmp_path / "runs")) == 1

    (tmp_path / "data/train/bee/0.png").unlink()
    strict = Gate(min_gain=1.0)
    refused = retrain(job, tmp_path, gate=strict)
    assert (refused.type, refused.name) == ("COMPLETED", "Refused")
    assert "min_gain asks for +100.00" in refused.message
    assert (registry.champion(), len(registry.versions())) == (1, 2)
    lineage = registry.versions()[-1].lineage
    assert (lineage.parent, lineage.is_accepted) == (1, False)
    trained = all_runs(tmp_path / "runs")[0].job().training
    assert isinstance(trained, ClassyTraining)
    assert trained.warm_start == str(registry.fetch(1))
    facts = json.loads((registry.fetch(2) / "comparison.json").read_text())
    assert (facts["news"], facts["champion_number"]) == ("train/bee: 12 -> 11 files", 1)
    assert sum(map(sum, facts["champion"]["confusion"])) == sum(map(sum, facts["challenger"]["confusion"]))

    # What was refused is not trained again every night.
    assert retrain(job, tmp_path, gate=strict).name == "NothingNew"
    (_, page) = sorted(comparison_artifacts(), key=len)[:2]
    assert "data:image/png;base64," in page


def test_a_rule_that_the_gate_does_not_know_is_refused_with_those_that_it_does() -> None:
    assert parse_gate(["min_gain=0.01", "min_class_samples=5"]) == Gate(min_gain=0.01, min_class_samples=5)
    with pytest.raises(RefusedInput, match=r"--gate min_again: .*; rules: min_accuracy, min_gain"):
        parse_gate(["min_again=0.01"])
    with pytest.raises(RefusedInput, match=r"--gate min_accuracy: .*less than or equal to 1"):
        parse_gate(["min_accuracy=90"])
