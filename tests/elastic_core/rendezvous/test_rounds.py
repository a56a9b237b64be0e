from __future__ import annotations

from collections.abc import Sequence

import pytest

from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.membership import Cause
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.rendezvous.rounds import (
    AwaitAgents,
    FormRound,
    RecallRound,
    RoundDecision,
    RoundPolicy,
    Rounds,
    RoundView,
)


def node(name: str, round_number: int = 0) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(name),
        address="10.0.0.1",
        probe_port=0,
        probe_token="",
        master_port=20_000,
        slots=1,
        lease=LeaseId(1),
        phase=NodePhase.READY,
        generation=round_number,
    )


def view(number: int, members: str, nodes: Sequence[NodeRecord]) -> RoundView:
    return RoundView(number=number, members=tuple(map(NodeId, members)), nodes=tuple(nodes))


def names(decision: RoundDecision) -> str:
    assert isinstance(decision, FormRound), decision
    return "".join(record.node_id for record in decision.members)


@pytest.fixture
def rounds() -> Rounds:
    return Rounds(RoundPolicy(min_nodes=2, max_nodes=3, last_call=5.0))


# ---- the first round -------------------------------------------------------------------------


def test_below_the_minimum_it_waits_without_a_time(rounds: Rounds) -> None:
    assert rounds.decide(view(0, "", [node("a")]), 0.0) == AwaitAgents(reason="1 of at least 2 nodes wait")


def test_with_enough_nodes_it_calls_last_until_the_time_is_over(rounds: Rounds) -> None:
    two = view(0, "", [node("a"), node("b")])
    first = rounds.decide(two, 10.0)
    later = rounds.decide(two, 14.9)
    formed = rounds.decide(two, 15.0)

    assert first == later == AwaitAgents(reason="2 of at most 3 nodes wait: last call", until=15.0)
    assert names(formed) == "ab"


def test_the_last_call_begins_anew_when_nodes_leave_below_the_minimum(rounds: Rounds) -> None:
    rounds.decide(view(0, "", [node("a"), node("b")]), 0.0)
    rounds.decide(view(0, "", [node("a")]), 4.0)
    decision = rounds.decide(view(0, "", [node("a"), node("c")]), 6.0)
    assert isinstance(decision, AwaitAgents)
    assert decision.until == 11.0


def test_with_the_maximum_it_forms_at_once_in_the_order_of_arrival(rounds: Rounds) -> None:
    decision = rounds.decide(view(0, "", [node("c"), node("a"), node("b"), node("d")]), 0.0)
    assert names(decision) == "cab"
    assert isinstance(decision, FormRound)
    assert (decision.number, decision.cause) == (1, Cause.START)


# ---- while a round runs ----------------------------------------------------------------------


def test_a_round_that_runs_undisturbed_is_left_alone(rounds: Rounds) -> None:
    decision = rounds.decide(view(4, "ab", [node("a", 3), node("b")]), 0.0)
    assert decision == AwaitAgents(reason="2 nodes run round 4")


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        ([node("a", 3)], "b is lost"),
        ([node("a", 3), node("b", 4)], "the workers of b ended"),
        ([node("a", 3), node("b", 3), node("c")], "c joins"),
    ],
)
def test_who_runs_is_recalled_for_a_loss_a_failure_and_a_newcomer(
    rounds: Rounds, nodes: list[NodeRecord], reason: str
) -> None:
    assert rounds.decide(view(4, "ab", nodes), 0.0) == RecallRound(number=4, reason=reason)


def test_a_newcomer_beyond_the_maximum_disturbs_nobody(rounds: Rounds) -> None:
    decision = rounds.decide(view(4, "abc", [node("a"), node("b"), node("c"), node("d")]), 0.0)
    assert isinstance(decision, AwaitAgents)


# ---- the rounds after it ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("nodes", "members", "cause"),
    [
        ([node("b", 4), node("a", 4)], "ab", Cause.FAILURE),
        ([node("b", 4), node("x")], "bx", Cause.LOSS),
        ([node("x"), node("a", 4), node("b", 4)], "abx", Cause.JOIN),
    ],
)
def test_when_all_who_are_alive_wait_the_next_round_is_formed_at_once_survivors_first(
    rounds: Rounds, nodes: list[NodeRecord], members: str, cause: Cause
) -> None:
    decision = rounds.decide(view(4, "ab", nodes), 0.0)
    assert names(decision) == members
    assert isinstance(decision, FormRound)
    assert (decision.number, decision.cause) == (5, cause)


def test_survivors_keep_their_order_whatever_the_order_of_their_records(rounds: Rounds) -> None:
    assert names(rounds.decide(view(2, "cab", [node("a", 2), node("b", 2), node("c", 2)]), 0.0)) == "cab"


def test_a_standby_takes_the_place_of_a_lost_member(rounds: Rounds) -> None:
    decision = rounds.decide(view(4, "abc", [node("a", 4), node("d", 2), node("c", 4)]), 0.0)
    assert names(decision) == "acd"


def test_survivors_below_the_minimum_wait_for_others(rounds: Rounds) -> None:
    decision = rounds.decide(view(4, "ab", [node("a", 4)]), 0.0)
    assert isinstance(decision, AwaitAgents)


def test_after_the_loss_of_all_members_there_is_a_last_call_again(rounds: Rounds) -> None:
    decision = rounds.decide(view(4, "ab", [node("x"), node("y")]), 1.0)
    assert isinstance(decision, AwaitAgents)
    assert decision.until == 6.0
