"""Which numbers of nodes may train together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic_core.model.job import NodeBounds
from elastic_core.model.sizes import ALL_SIZES, AllowedSizes

SIZES = st.one_of(
    st.builds(AllowedSizes, multiple_of=st.integers(1, 9)),
    st.builds(
        AllowedSizes, listed=st.sets(st.integers(1, 40), min_size=1).map(lambda sizes: tuple(sorted(sizes)))
    ),
)


def is_allowed(sizes: AllowedSizes, nodes: int) -> bool:
    return nodes in sizes.listed if sizes.listed else nodes % sizes.multiple_of == 0


@given(sizes=SIZES, nodes=st.integers(1, 50))
def test_the_largest_size_within_and_the_least_from_a_number_leave_none_out(
    sizes: AllowedSizes, nodes: int
) -> None:
    allowed = [size for size in range(1, 200) if is_allowed(sizes, size)]
    assert sizes.largest_within(nodes) == max((size for size in allowed if size <= nodes), default=0)
    assert sizes.least_from(nodes) == min((size for size in allowed if size >= nodes), default=0)


def test_sizes_are_described_as_a_person_would() -> None:
    assert ALL_SIZES.describe() == "any number"
    assert AllowedSizes(multiple_of=4).describe() == "a multiple of 4"
    assert AllowedSizes(listed=(2, 4, 8)).describe() == "2, 4 or 8"
    assert AllowedSizes(listed=(2,)).describe() == "2"


def test_a_job_lists_sizes_in_any_order() -> None:
    assert NodeBounds(target=2, sizes=(4, 2, 2)).allowed == AllowedSizes(listed=(2, 4))


@pytest.mark.parametrize(
    ("nodes", "remedy"),
    [
        (
            {"target": 3, "multiple_of": 2},
            "target is 3: choose an allowed size (a multiple of 2)",
        ),
        ({"target": 3, "sizes": (2, 4)}, "target is 3: choose an allowed size (2 or 4)"),
        ({"sizes": (2,), "multiple_of": 2}, "sizes and multiple_of (2) are both given: drop one of them"),
    ],
)
def test_a_target_that_could_never_train_is_refused(nodes: dict[str, object], remedy: str) -> None:
    with pytest.raises(ValidationError) as refused:
        NodeBounds.model_validate(nodes)
    assert remedy in str(refused.value)
