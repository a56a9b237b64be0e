"""The gate's rules, each at its edge."""

import pytest
from pydantic import ValidationError

from elastic_core.quality.data import DataPrint
from elastic_core.quality.gate import Gate, judge
from elastic_core.quality.score import Score, score_of


def score(cat: int, dog: int, of: int = 100) -> Score:
    """Return the score of a model that names so many of `of` cats and dogs rightly."""
    return Score(classes=("cat", "dog"), confusion=((cat, of - cat), (of - dog, dog)))


def test_a_score_counts_each_sample_at_its_own_class_and_the_named_one() -> None:
    counted = score_of([0, 0, 1, 1], [0, 1, 1, 1], ["cat", "dog"])
    assert counted.confusion == ((1, 1), (0, 2))
    assert (counted.samples, counted.correct, counted.accuracy) == (4, 3, 0.75)
    assert counted.recalls() == {"cat": 0.5, "dog": 1.0}


def test_a_class_without_samples_has_no_recall_and_nothing_is_divided_by_zero() -> None:
    empty = score_of([], [], ["cat"])
    assert (empty.accuracy, dict(empty.recalls())) == (0.0, {})


def test_a_matrix_that_does_not_fit_its_classes_is_refused() -> None:
    with pytest.raises(ValidationError, match="must have 2 rows and columns"):
        Score(classes=("cat", "dog"), confusion=((1, 2),))


def test_the_first_model_is_champion_if_it_is_good_enough() -> None:
    assert judge(Gate(min_accuracy=0.9), score(90, 90), None).is_promoted
    refused = judge(Gate(min_accuracy=0.9), score(90, 89), None)
    assert not refused.is_promoted
    assert refused.reasons == ("accuracy 89.50% is below min_accuracy 90.00%",)


@pytest.mark.parametrize(
    ("gain", "dogs", "promoted"),
    [(0.0, 80, True), (0.0, 79, False), (0.05, 90, True), (0.05, 89, False), (-0.01, 78, True)],
)
def test_the_gain_is_asked_for_to_the_sample(gain: float, dogs: int, promoted: bool) -> None:
    assert judge(Gate(min_gain=gain), score(80, dogs), score(80, 80)).is_promoted is promoted


@pytest.mark.parametrize(("cats", "promoted"), [(85, True), (84, False)])
def test_no_class_may_pay_for_the_gain_of_the_others(cats: int, promoted: bool) -> None:
    verdict = judge(Gate(max_class_regression=0.05), score(cats, 100), score(90, 50))
    assert verdict.is_promoted is promoted
    if not promoted:
        assert verdict.reasons == (
            "class 'cat' fell from 90.00% to 84.00%: max_class_regression allows 5.00 points",
        )


def test_a_class_with_few_samples_is_not_judged_by_itself() -> None:
    few = judge(Gate(min_class_samples=10), score(4, 9, of=9), score(5, 8, of=9))
    assert few.is_promoted


def test_a_class_that_the_champion_never_saw_cannot_have_become_worse() -> None:
    old = Score(classes=("cat",), confusion=((50,),))
    assert judge(Gate(min_gain=-1), score(100, 10), old).is_promoted


def test_every_broken_rule_is_told() -> None:
    assert len(judge(Gate(min_accuracy=0.9), score(10, 80), score(80, 80)).reasons) == 3


def test_equal_contents_are_no_news_and_new_files_are_told_by_folder() -> None:
    old = DataPrint(digest="a", files=5, folders={"cat": 3, "dog": 2})
    assert old.news_since(old) == ""
    new = DataPrint(digest="b", files=7, folders={"cat": 3, "dog": 3, "fox": 1})
    assert new.news_since(old) == "dog: 2 -> 3 files; fox: 0 -> 1 files"
    assert (
        DataPrint(digest="c", files=5, folders=old.folders).news_since(old) == "contents changed in 5 files"
    )
    assert old.news_since(None) == "no model has seen these data: 5 files"
