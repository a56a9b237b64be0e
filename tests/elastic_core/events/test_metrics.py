from typing import Any

from elastic_core.events.metrics import MetricLine, dataset_size, parse_metrics, surviving
from elastic_core.model.progress import RunResult
from tests.elastic_core.events.records import evaluation, step


def test_a_step_and_an_evaluation_are_told_apart() -> None:
    trained = {"step": 3, "epoch": 1, "samples": 256, "attempt": 2, "generation": 4, "world_size": 2,
               "wall_time": 7.5, "checkpoint_s": 0.25, "metrics": {"loss": 0.5}}  # fmt: skip
    evaluated = {"step": 4, "epoch": 1, "attempt": 2, "generation": 4, "wall_time": 8.0,
                 "evaluation": {"test_accuracy": 0.9}}  # fmt: skip
    assert list(parse_metrics([trained, evaluated])) == [
        MetricLine(
            phase="train", attempt=2, generation=4, step=3, epoch=1, wall_time=7.5, samples=256,
            world_size=2, checkpoint_s=0.25, figures={"loss": 0.5},
        ),
        MetricLine(
            phase="evaluate", attempt=2, generation=4, step=4, epoch=1, wall_time=8.0,
            figures={"test_accuracy": 0.9},
        ),
    ]  # fmt: skip


def test_what_is_no_number_is_no_figure() -> None:
    strange: dict[str, Any] = {"loss": float("nan"), "lr": 0.1, "name": "x", "n": True, "big": 10**400}
    (line,) = parse_metrics([{"step": 0, "generation": 1, "wall_time": 1, "metrics": strange}])
    assert line.figures == {"lr": 0.1}


def test_lines_of_another_form_are_passed_over() -> None:
    strange: list[dict[str, Any]] = [
        {"loss": 0.1},
        {"step": 0, "metrics": {}},
        {"step": 0, "generation": 1, "metrics": {}, "wall_time": float("inf")},
        {"step": 0, "generation": 1, "metrics": [], "wall_time": 1.0},
    ]
    assert list(parse_metrics(strange)) == []


def test_steps_that_a_later_generation_does_again_are_not_in_the_model() -> None:
    lines = [step(0, 1), step(1, 2), evaluation(2, 2.5), step(2, 3), step(2, 5, g=2), step(3, 6, g=2)]
    assert [(line.phase[0], line.step, line.generation) for line in surviving(lines)] == [
        ("t", 0, 1), ("t", 1, 1), ("e", 2, 1), ("t", 2, 2), ("t", 3, 2),
    ]  # fmt: skip


def test_what_a_fenced_generation_still_writes_is_not_in_the_model() -> None:
    lines = [step(0, 1), step(1, 4, g=2), step(1, 5, g=1), step(2, 6, g=1)]
    assert [(line.step, line.generation) for line in surviving(lines)] == [(0, 1), (1, 2)]


def test_a_later_attempt_undoes_what_its_checkpoint_does_not_have() -> None:
    lines = [step(0, 1, g=9), step(1, 2, g=9), step(1, 8, g=1, a=2)]
    assert [(line.step, line.attempt) for line in surviving(lines)] == [(0, 1), (1, 2)]


def test_the_size_of_the_dataset_is_an_epochs_share_of_the_result() -> None:
    assert dataset_size([], RunResult(epochs=10, steps=230, samples=14_370)) == 1437


def test_the_size_of_the_dataset_shows_where_an_epoch_ends() -> None:
    lines = [step(n, n, epoch=n // 3, samples=50 * (n + 1) // 3) for n in range(7)]
    assert dataset_size(lines, None) == 50
    assert dataset_size(lines[4:], None) == 50
    assert dataset_size(lines[:3], None) == 0, "no epoch is over yet"
