from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torchvision

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.compat import build_model
from elastic_core.trainer.classy.export import load_exported
from elastic_core.trainer.classy.solo import SoloReducer
from tests.elastic_core.trainer.classy.conftest import (
    largest_difference,
    make_trainee,
    small_config,
    snapshot,
)
from tests.elastic_core.trainer.classy.fake_world import FakeWorld

ALONE = SoloReducer()


def model(**keys: Any) -> dict[str, Any]:
    """Return the smallest convolutional model of torchvision."""
    return {"name": "torchvision", "model": "mobilenet_v3_small", "num_classes": 10, **keys}


def fine_tuning(weights: Path, **keys: Any) -> dict[str, Any]:
    return small_config(
        **{"name": "fine_tuning", "pretrained_checkpoint": str(weights), "model": model(), **keys}
    )


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of a torchvision model for seven classes, as torchvision itself names them."""
    path = tmp_path_factory.mktemp("weights") / "seven.pt"
    torch.manual_seed(3)
    torch.save(torchvision.models.mobilenet_v3_small(num_classes=7).state_dict(), path)
    return path


def test_a_model_of_torchvision_trains_alike_at_any_world_size() -> None:
    config = small_config(model=model(options={"dropout": 0.3}))
    alone = make_trainee(config)
    losses = [alone.train_step(ALONE).metrics["loss"] for _ in range(2)]
    ranks = [make_trainee(config) for _ in range(2)]

    def work(reducer: Any) -> list[float]:
        return [ranks[reducer.rank].train_step(reducer).metrics["loss"] for _ in range(2)]

    assert FakeWorld(2).run(work)[0] == pytest.approx(losses, rel=1e-4)
    assert alone.task.base_model.model.classifier[2].p == 0.3


def test_weights_of_another_number_of_classes_leave_the_classifier_as_it_was(weights: Path) -> None:
    torch.manual_seed(1)
    built = build_model(model(weights=str(weights))).state_dict()
    given = torch.load(weights, weights_only=True)
    assert torch.equal(built["model.features.0.0.weight"], given["features.0.0.weight"])
    assert built["model.classifier.3.weight"].shape == (10, 1024)


def test_an_exported_model_of_torchvision_needs_no_weights_file_any_more(
    weights: Path, tmp_path: Path
) -> None:
    trainee = make_trainee(small_config(model=model(weights=str(weights))))
    trainee.export(tmp_path)
    assert "weights" not in (tmp_path / "config.json").read_text()
    exported = load_exported(tmp_path).model
    assert torch.equal(
        exported(torch.ones(1, 3, 16, 16)), trainee.task.base_model.eval()(torch.ones(1, 3, 16, 16))
    )


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"model": "resnet17"}, "torchvision: there is no model 'resnet17' (did you mean 'resnet1"),
        ({"model": 18}, "torchvision: model is 18: give the name"),
        ({"num_classes": 0}, "torchvision: num_classes is 0: give the number"),
        ({"heads": [{"name": "fully_connected"}]}, "torchvision: heads: the model's own last layer"),
        ({"weights": "DEFAULT"}, "torchvision: weights: 'DEFAULT' is no file; write one by"),
        ({"name": "timm", "model": "resnet17"}, "timm: "),
    ],
)
def test_a_mistake_in_a_named_model_is_refused(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(RefusedInput, match=re.escape(problem)):
        build_model({**model(), **keys})


@pytest.mark.skipif(importlib.util.find_spec("timm") is not None, reason="timm is installed")
def test_a_missing_timm_is_told_in_one_line() -> None:
    with pytest.raises(RefusedInput) as refusal:
        build_model({"name": "timm", "model": "resnet18", "num_classes": 10})
    assert refusal.value.problems == ("timm: is not installed where this runs: pip install timm",)


@pytest.mark.case("C09")
def test_weights_of_another_model_are_refused_with_the_first_tensor(weights: Path, tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match=r"tensor 'model\.conv1\.weight' of the model is not in the file"):
        build_model({**model(model="resnet18", weights=str(weights))})
    wide = torch.load(weights, weights_only=True)
    wide["features.0.0.weight"] = torch.zeros(16, 4, 3, 3)
    torch.save(wide, tmp_path / "wide.pt")
    with pytest.raises(RefusedInput, match=r"has shape \(16, 4, 3, 3\) in the file and \(16, 3, 3, 3\)"):
        build_model(model(weights=str(tmp_path / "wide.pt")))


def test_a_file_that_could_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"weight": re.compile("x")}, tmp_path / "evil.pt")
    with pytest.raises(RefusedInput, match=r"evil\.pt' does not hold weights alone"):
        build_model(model(weights=str(tmp_path / "evil.pt")))


# ---- fine-tuning -----------------------------------------------------------------------------


def test_fine_tuning_of_a_frozen_trunk_trains_the_classifier_alone(weights: Path) -> None:
    config = fine_tuning(weights, reset_heads=True, freeze_trunk=True)
    trainee = make_trainee(config)
    assert list(trainee.parameters()) == ["model.classifier.3.weight", "model.classifier.3.bias"]
    before = snapshot(trainee)
    trainee.train_step(ALONE)
    changed = {
        name
        for name, tensor in snapshot(trainee).items()
        if not torch.equal(tensor, before.get(name, tensor))
    }
    assert {name for name in changed if name.startswith("model.")} == {
        "model.model.classifier.3.weight",
        "model.model.classifier.3.bias",
    }
    given = torch.load(weights, weights_only=True)
    assert torch.equal(before["model.model.features.0.0.weight"], given["features.0.0.weight"])


def test_fine_tuning_of_classy_visions_models_starts_from_a_state_dict_or_a_checkpoint(
    tmp_path: Path,
) -> None:
    trained = make_trainee()
    trained.train_step(ALONE)
    trained.export(tmp_path / "export")
    state = {"classy_state_dict": {"base_model": trained.task.base_model.get_classy_state()}}
    torch.save(state, tmp_path / "classy.torch")
    base = {"model": small_config()["model"]}
    from_export = make_trainee(fine_tuning(tmp_path / "export" / "model.pt", **base))
    from_classy = make_trainee(fine_tuning(tmp_path / "classy.torch", **base))
    reset = make_trainee(
        fine_tuning(tmp_path / "export" / "model.pt", reset_heads=True, freeze_trunk=True, **base)
    )
    weights = {name: tensor for name, tensor in snapshot(trained).items() if name.startswith("model.")}
    assert largest_difference(snapshot(from_export), weights) == 0
    assert largest_difference(snapshot(from_classy), weights) == 0
    differs = {name for name, tensor in snapshot(reset).items() if not torch.equal(tensor, weights[name])}
    assert {name.split(".")[1] for name in differs} == {"_heads"}
    assert {name.split(".")[0] for name in reset.parameters()} == {"_heads"}


def test_a_checkpoint_of_another_trunk_is_refused_with_the_first_tensor(tmp_path: Path) -> None:
    other = {**small_config()["model"], "init_planes": 8}
    other["heads"] = [{**other["heads"][0], "in_plane": 8}]
    state = {"classy_state_dict": {"base_model": build_model(other).get_classy_state()}}
    torch.save(state, tmp_path / "other.torch")
    config = fine_tuning(tmp_path / "other.torch", model=small_config()["model"])
    with pytest.raises(RefusedInput, match=r"tensor '.*' has shape \(8, .*\) in the file and \(4, "):
        make_trainee(config)
