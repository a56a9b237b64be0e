"""`--set`: values on the command line."""

import pytest

from elastic_core.errors import RefusedInput
from tasks.overrides import apply_overrides


def test_values_are_yaml_and_the_given_data_stay_as_they_were() -> None:
    data = {"name": "digits", "nodes": {"min": 1, "max": 4}}
    changed = apply_overrides(data, ["nodes.target=3", "nodes.max=5", "checkpoint.every_seconds=2.5"])
    assert changed == {
        "name": "digits",
        "nodes": {"min": 1, "max": 5, "target": 3},
        "checkpoint": {"every_seconds": 2.5},
    }
    assert data == {"name": "digits", "nodes": {"min": 1, "max": 4}}


def test_a_value_may_hold_an_equals_sign() -> None:
    assert apply_overrides({}, ["training.script=a=b.py"]) == {"training": {"script": "a=b.py"}}


def test_all_malformed_overrides_are_told_at_once() -> None:
    with pytest.raises(RefusedInput) as refused:
        apply_overrides({}, ["nodes.target", "=3", "name=[", "name=fine"])
    assert [line.split(":")[0] for line in refused.value.problems] == [
        "--set 'nodes.target'",
        "--set '=3'",
        "--set 'name=['",
    ]
