"""A training that begins with a trained model, and a trained model that is tried on held-out data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ClassyTraining, ElasticOptions, JobSpec
from elastic_core.trainer.__main__ import main
from elastic_core.trainer.classy.scoring import score_model
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.validate import judge
from tests.elastic_core.trainer.classy.conftest import make_trainee, small_config
from tests.elastic_core.trainer.classy.images import picture_config

ALONE = SoloReducer()


def trained(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """Return the export of a training of two steps."""
    trainee = make_trainee(config)
    for _ in range(2):
        trainee.train_step(ALONE)
    trainee.evaluate(ALONE)
    return Path(trainee.export(directory))


def job_of(config: dict[str, Any], **training: Any) -> JobSpec:
    options = ElasticOptions(global_batch=32)
    return JobSpec(training=ClassyTraining(config=config, elastic=options, **training))


def with_outputs(count: int) -> dict[str, Any]:
    config = small_config()
    config["model"]["heads"][0]["num_classes"] = count
    return config


def test_a_warm_training_begins_with_the_weights_and_buffers_of_the_model(tmp_path: Path) -> None:
    model = trained(tmp_path / "model")
    weights = torch.load(model / "model.pt", weights_only=True)
    warm = make_trainee(warm_start=str(model)).task.base_model.state_dict()
    cold = make_trainee().task.base_model.state_dict()
    assert all(torch.equal(warm[name], weights[name]) for name in weights)
    assert not all(torch.equal(cold[name], weights[name]) for name in weights)


def test_where_a_class_came_only_the_layer_of_the_outputs_begins_anew(tmp_path: Path) -> None:
    model = trained(tmp_path / "model")
    weights = torch.load(model / "model.pt", weights_only=True)
    warm = make_trainee(with_outputs(12), warm_start=str(model)).task.base_model.state_dict()
    anew = {name for name in weights if warm[name].shape != weights[name].shape}
    assert anew == {name for name in weights if "head" in name}
    assert all(torch.equal(warm[name], weights[name]) for name in weights.keys() - anew)
    assert {len(warm[name]) for name in anew} == {12}


def test_another_model_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    model = trained(tmp_path / "model")
    wider = small_config()
    wider["model"]["init_planes"] = 8
    wider["model"]["heads"][0]["in_plane"] = 8
    (problem,) = judge(job_of(wider, warm_start=str(model)), tmp_path).problems
    assert problem.startswith(f"training.warm_start: {str(model)!r} holds another model (")


def test_a_directory_without_a_model_is_refused_with_its_path(tmp_path: Path) -> None:
    (problem,) = judge(job_of(small_config(), warm_start="nowhere"), tmp_path).problems
    assert problem.startswith("training.warm_start: 'nowhere' holds no exported model")


def test_a_model_scores_what_its_training_told_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = trained(tmp_path / "model")
    told = json.loads((model / "config.json").read_text())["metrics"]["test_accuracy"]
    job = tmp_path / "job.yaml"
    job.write_text(job_of(small_config()).model_dump_json())
    assert main(["score", str(job), str(model), "--json"]) == 0
    score = json.loads(capsys.readouterr().out)
    assert np.trace(score["confusion"]) == told * 50
    assert np.sum(score["confusion"]) == 50


def test_labels_are_matched_by_name_where_a_class_came_in_between(tmp_path: Path) -> None:
    model = trained(tmp_path / "model", picture_config(tmp_path / "two", "ant", "cat"))
    score = score_model(job_of(picture_config(tmp_path / "three", "ant", "bee", "cat")), tmp_path, model)
    assert score.classes == ("ant", "bee", "cat")
    named = [sum(column) for column in zip(*score.confusion, strict=True)]
    assert named[1] == 0  # a model that does not know bees names none
    assert sum(score.confusion[1]) == 12


def test_a_job_without_held_out_data_cannot_judge(tmp_path: Path) -> None:
    config = small_config()
    config["dataset"]["test"] = None
    with pytest.raises(RefusedInput, match=r"dataset\.test: is required"):
        score_model(job_of(config), tmp_path, tmp_path)
