"""What may be asked of a running job's size, and how each mistake is told."""

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import NodeBounds
from elastic_core.model.membership import Target
from elastic_core.rescale.decision import Rescale, decide, describe

JOB = NodeBounds(min=1, max=6, target=2)


@pytest.mark.parametrize(
    ("wish", "now", "then"),
    [
        (Rescale(target=3), None, Target(nodes=3, least=1, most=6)),
        (Rescale(target=3), Target(nodes=5, least=2, most=5), Target(nodes=3, least=2, most=5)),
        (Rescale(min=4), Target(nodes=2), Target(nodes=4, least=4, most=6)),
        (Rescale(max=4), Target(nodes=6), Target(nodes=4, least=1, most=4)),
        (Rescale(target=2, min=2, max=2), None, Target(nodes=2, least=2, most=2)),
        (Rescale(max=6), Target(nodes=2, least=2, most=2), Target(nodes=2, least=2, most=6)),
    ],
)
def test_a_wish_within_the_jobs_limits_is_followed(wish: Rescale, now: Target | None, then: Target) -> None:
    assert decide(wish, JOB, now) == then


@pytest.mark.parametrize(
    ("wish", "now", "problems"),
    [
        (Rescale(), None, ("nothing was asked for: give a target, a min or a max",)),
        (Rescale(target=7), None, ("target is 7: choose one from 1 to 6, the job's own bounds",)),
        (
            Rescale(min=8, max=9),
            None,
            (
                "min is 8: choose one from 1 to 6, the job's own bounds",
                "max is 9: choose one from 1 to 6, the job's own bounds",
            ),
        ),
        (Rescale(min=4, max=3), None, ("min is 4 and max is 3: raise max or lower min",)),
        (Rescale(target=5), Target(nodes=2, most=4), ("target is 5: choose one from min (1) to max (4)",)),
    ],
)
def test_a_wish_outside_of_them_is_refused_in_a_line_each(
    wish: Rescale, now: Target | None, problems: tuple[str, ...]
) -> None:
    with pytest.raises(RefusedInput) as refused:
        decide(wish, JOB, now)
    assert refused.value.problems == problems


def test_a_size_that_the_job_does_not_allow_is_refused() -> None:
    pairs = NodeBounds(min=2, max=6, target=2, multiple_of=2)
    assert decide(Rescale(target=4), pairs, None).nodes == 4
    with pytest.raises(RefusedInput, match=r"target is 3: choose an allowed size \(a multiple of 2\)"):
        decide(Rescale(target=3), pairs, None)


def test_a_change_is_told_in_one_sentence() -> None:
    told = describe(Target(nodes=2), Target(nodes=4, least=1, most=6))
    assert told == "the target goes from 2 to 4 nodes (from 1 to 6)"
