from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.script.parts import Boundary, load_parts


def parts(hidden: int, *, momentum: float = 0.9) -> dict[str, Any]:
    torch.manual_seed(hidden)
    model = torch.nn.Sequential(torch.nn.Linear(2, hidden), torch.nn.BatchNorm1d(hidden))
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)}


def states(of: dict[str, Any]) -> dict[str, Any]:
    return {name: part.state_dict() for name, part in of.items()}


def test_states_go_into_the_parts_of_their_names() -> None:
    old, new = parts(4), parts(4)
    with torch.no_grad():
        old["model"][0].weight.add_(1)
    load_parts(new, states(old))
    assert torch.equal(new["model"][0].weight, old["model"][0].weight)


@pytest.mark.case("C09")
def test_a_changed_model_is_refused_by_its_first_tensor_with_both_shapes_and_stays_as_it_was() -> None:
    new = parts(5)
    before = new["model"][0].weight.clone()
    with pytest.raises(RefusedInput) as refusal:
        load_parts(new, states(parts(4)))
    assert refusal.value.problems[0].startswith(
        "model.0.weight: shape (4, 2) in the saved state → shape (5, 2) now"
    )
    assert torch.equal(new["model"][0].weight, before)


def test_a_part_more_or_less_is_refused_by_name() -> None:
    saved = states(parts(4))
    with pytest.raises(RefusedInput, match="optimizer: it was saved"):
        load_parts({"model": parts(4)["model"]}, saved)
    with pytest.raises(RefusedInput, match=r"average: elastic\.Snapshot\(\) is given it now"):
        load_parts({**parts(4), "average": torch.nn.Linear(1, 1)}, saved)


def test_what_a_part_itself_refuses_is_told_with_its_name() -> None:
    mine = parts(4)
    mine["optimizer"] = torch.optim.SGD([mine["model"][0].weight], lr=0.1)
    with pytest.raises(RefusedInput, match=r"optimizer: its saved state does not fit \(loaded state dict"):
        load_parts(mine, states(parts(4)))


@pytest.mark.parametrize(("evaluates", "is_here"), [(True, True), (False, False)])
def test_a_forward_pass_in_training_leaves_the_boundary_and_an_evaluation_does_not(
    evaluates: bool, is_here: bool
) -> None:
    mine = parts(4)
    boundary = Boundary(mine.values())
    mine["model"].train(not evaluates)
    mine["model"](torch.ones(3, 2))
    assert boundary.is_here is is_here


def test_an_optimizers_step_leaves_the_boundary() -> None:
    mine = parts(4)
    boundary = Boundary([mine["optimizer"]])
    mine["optimizer"].step()
    assert not boundary.is_here
