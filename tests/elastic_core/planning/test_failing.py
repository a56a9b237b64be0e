"""A node that is the root cause again and again leaves; a program that fails everywhere keeps its nodes."""

from dataclasses import replace

import pytest

from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.planning.crew import Crew, Drain, Keep
from elastic_core.planning.failing import exclude_failing

A, B, C = NodeId("a.1"), NodeId("b.1"), NodeId("c.1")


def failure(generation: int, node: NodeId = B, *, consequence: bool = False) -> Failure:
    return Failure(
        node_id=node,
        generation=generation,
        rank=1,
        local_rank=0,
        exit_code=1,
        message="ValueError: bad label 7",
        consequence=consequence,
    )


def verdict(
    *failures: Failure, after: int = 2, members: tuple[NodeId, ...] = (A, B, C), least: int = 1
) -> Drain | Keep | None:
    return exclude_failing(failures, Crew(members=set(members), least=least), after=after)


def test_a_node_that_was_the_root_cause_twice_in_a_row_leaves() -> None:
    assert verdict(failure(1), failure(3)) == Drain(
        node_id=B, reason="the last 2 failures all began on b (ValueError: bad label 7)"
    )


@pytest.mark.parametrize(
    "failures",
    [
        (failure(1),),
        (failure(1), failure(2, A)),
        (failure(1), failure(2), failure(3, A)),
        (failure(1), failure(1, consequence=True)),
        (failure(1, consequence=True), failure(2, consequence=True)),
    ],
    ids=["once", "two nodes", "another since", "one generation", "consequences"],
)
def test_what_is_chance_or_everywhere_excludes_nobody(failures: tuple[Failure, ...]) -> None:
    assert verdict(*failures) is None


def test_the_first_of_a_generation_is_its_root_cause_and_a_new_incarnation_the_same_machine() -> None:
    again = replace(failure(3), node_id=NodeId("b.2"))
    assert verdict(failure(1), failure(1, A), again, members=(A, NodeId("b.2"))) == Drain(
        node_id=NodeId("b.2"), reason="the last 2 failures all began on b (ValueError: bad label 7)"
    )


def test_without_whom_too_few_are_left_is_kept_and_that_is_said() -> None:
    assert verdict(failure(1), failure(2), members=(A, B), least=2) == Keep(
        reason="the last 2 failures all began on b (ValueError: bad label 7): "
        "kept, for 1 would be left of at least 2"
    )


@pytest.mark.parametrize(("after", "members"), [(0, (A, B)), (3, (A, B)), (2, (B,)), (2, (A, C))])
def test_a_limit_of_none_a_longer_one_a_single_node_and_one_that_left(
    after: int, members: tuple[NodeId, ...]
) -> None:
    assert verdict(failure(1), failure(2), after=after, members=members) is None
