"""Who prints the traceback of a bug that every rank has."""

from dataclasses import replace

import pytest

from elastic_core.agent.report import traceback_to_print
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure

MINE = Failure(
    node_id=NodeId("a.1"),
    generation=1,
    rank=0,
    local_rank=0,
    exit_code=1,
    message="SyntaxError: invalid syntax",
    traceback="mine",
    wall_time=1.0,
)
PEERS = replace(MINE, rank=1, local_rank=1, traceback="my second worker's", wall_time=1.5)
OTHERS = replace(MINE, node_id=NodeId("b.1"), rank=2, traceback="another node's", wall_time=2.0)


@pytest.mark.case("W07")
def test_the_node_of_the_root_cause_prints_it_and_no_other_that_has_the_same() -> None:
    written = [OTHERS, MINE]
    assert traceback_to_print([OTHERS], written) == "another node's"
    assert traceback_to_print([MINE, PEERS], written) == ""


def test_of_several_local_workers_the_one_that_was_reported_counts() -> None:
    assert traceback_to_print([PEERS, MINE], [MINE, OTHERS]) == "mine"


def test_a_consequence_is_not_what_all_have() -> None:
    assert traceback_to_print([MINE], [replace(OTHERS, consequence=True), MINE]) == "mine"


def test_what_nobody_else_has_is_printed_in_any_case() -> None:
    assert traceback_to_print([MINE], [replace(OTHERS, message="OSError: full")]) == "mine"
    assert traceback_to_print([MINE], []) == "mine"


def test_what_the_workers_printed_themselves_is_not_repeated() -> None:
    assert traceback_to_print([], [MINE, OTHERS]) == ""
