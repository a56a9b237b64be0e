"""Reconciliation: what is launched, what is ended, and when it holds or gives up."""

from dataclasses import replace

import pytest

from elastic_core.cluster.provider import Instance, InstanceState, LaunchResult
from elastic_core.exits import ExitCode
from elastic_core.model.job import JobSpec, NodeBounds
from elastic_core.planning.launches import LaunchLog, LaunchRecord
from elastic_core.planning.plan import ClusterPlan, plan_cluster
from elastic_core.planning.reconciliation import GiveUp, Hold, Launch, NodeAction, Terminate, reconcile

PLAN = ClusterPlan(nodes=2, min_nodes=1, max_nodes=4, replacements_per_hour=5)
EMPTY = LaunchLog(owner="1")


def instance(name: str, state: InstanceState = InstanceState.RUNNING, **more: object) -> Instance:
    return Instance(name=name, state=state, **more)  # type: ignore[arg-type]


def ended(name: str, **more: object) -> Instance:
    return instance(name, InstanceState.ENDED, **more)


def granted(*names: str, lost: int = 0, at: float = 0.0, wanted: int = 2, token: str = "1-1") -> LaunchRecord:
    return LaunchRecord(
        token=token,
        count=len(names),
        lost=lost,
        wanted=wanted,
        asked_at=at,
        awaited=frozenset(names),
    )


def act(
    observed: list[Instance],
    log: LaunchLog = EMPTY,
    *,
    plan: ClusterPlan = PLAN,
    members: set[str] | None = None,
    now: float = 0.0,
) -> tuple[NodeAction, ...]:
    return reconcile(plan, observed, log=log.noticed(observed), members=members or set(), now=now)


def test_a_plan_takes_its_numbers_from_the_job() -> None:
    job = JobSpec(nodes=NodeBounds(min=1, max=4, target=3))
    assert plan_cluster(job) == ClusterPlan(nodes=3, min_nodes=1, max_nodes=4, replacements_per_hour=10)


@pytest.mark.parametrize(("asked", "nodes"), [(0, 1), (3, 3), (9, 4)])
def test_a_resized_plan_stays_within_its_bounds(asked: int, nodes: int) -> None:
    assert PLAN.resized(asked).nodes == nodes


def test_a_node_that_finished_is_not_replaced() -> None:
    assert act([instance("a"), ended("b", exit_code=0)], EMPTY.asked(granted("a", "b"))) == ()


def test_the_first_tick_launches_all_nodes_at_once() -> None:
    (launch,) = act([])
    assert isinstance(launch, Launch)
    assert (launch.count, launch.token, launch.record.lost) == (2, "1-1", 0)
    assert launch.reason == "2 nodes more, to have 2"


def test_nothing_is_done_when_the_plan_is_met() -> None:
    assert act([instance("a"), instance("b", InstanceState.PENDING)]) == ()


def test_nodes_that_were_granted_and_are_not_listed_yet_count() -> None:
    log = replace(EMPTY, records=(granted("a", "b"),))
    assert act([], log, now=100.0) == ()
    assert act([instance("a")], log, now=100.0) == ()


def test_granted_nodes_that_never_appear_are_launched_again() -> None:
    log = replace(EMPTY, records=(granted("a", "b"),))
    (launch,) = act([], log, now=180.0)
    assert isinstance(launch, Launch)
    assert (launch.count, launch.token) == (2, "1-2")


def test_an_ended_node_is_replaced_at_once_the_first_time() -> None:
    log = replace(EMPTY, records=(granted("a", "b"),))
    (launch,) = act([instance("a"), ended("b")], log, now=50.0)
    assert isinstance(launch, Launch)
    assert (launch.count, launch.record.lost, launch.reason) == (1, 1, "1 node missing of 2")


def test_a_stopping_node_is_replaced_already() -> None:
    log = replace(EMPTY, records=(granted("a", "b"),))
    (launch,) = act([instance("a"), instance("b", InstanceState.STOPPING)], log, now=50.0)
    assert isinstance(launch, Launch)
    assert launch.count == 1


def test_replacements_that_follow_each_other_are_slowed_down() -> None:
    log = replace(
        EMPTY,
        records=(
            granted("a", "b"),
            granted("c", lost=1, at=50.0, token="1-2"),
            granted("d", lost=1, at=60.0, token="1-3"),
        ),
    )
    world = [instance("a"), ended("b"), ended("c"), ended("d")]
    assert act(world, log, now=61.0) == (
        Hold(reason="2 replacements in the last 10 minutes: the next one after 4 s", until=64.0),
    )
    (launch,) = act(world, log, now=64.0)
    assert isinstance(launch, Launch)
    assert launch.token == "1-4"


def test_the_hour_s_limit_of_replacements_holds_while_some_node_lives() -> None:
    records = [granted("a", "b"), granted("c", "d", "e", "f", "g", lost=5, at=100.0, token="1-2")]
    log = replace(EMPTY, records=tuple(records))
    world = [instance("a"), *(ended(name) for name in "bcdefg")]
    assert act(world, log, now=1000.0) == (
        Hold(
            reason="the limit of 5 replacements an hour is reached: going on with fewer nodes",
            until=100.0 + 3600.0,
        ),
    )
    (launch,) = act(world, log, now=3700.0)
    assert isinstance(launch, Launch)


def test_the_hour_s_limit_gives_up_when_no_node_lives() -> None:
    records = (granted("a", "b"), granted("c", "d", "e", "f", "g", lost=5, at=100.0, token="1-2"))
    log = replace(EMPTY, records=records)
    world = [ended(name, exit_code=137, detail="out of memory") for name in "abcdefg"]
    assert act(world, log, now=1000.0) == (
        GiveUp(
            exit_code=69,
            reason="the limit of 5 replacements an hour is reached and no node lives; "
            "the last one, g, ended with 137 out of memory",
        ),
    )


def test_no_more_is_replaced_than_the_hour_allows() -> None:
    log = replace(EMPTY, records=(granted("a", lost=4, at=0.0, wanted=4),))
    (launch,) = act([], log, plan=PLAN.resized(4), now=3000.0)
    assert isinstance(launch, Launch)
    assert launch.count == 1


def test_an_agent_that_refused_its_input_is_not_replaced() -> None:
    log = replace(EMPTY, records=(granted("a", "b"),))
    world = [ended("a", exit_code=int(ExitCode.REFUSED), detail="no such file"), ended("b", exit_code=2)]
    (give_up,) = act(world, log, now=5.0)
    assert give_up == GiveUp(
        exit_code=2, reason="the agent on a refused its input (no such file): another one would too"
    )


def test_growth_is_neither_slowed_down_nor_counted() -> None:
    records = (granted("a", "b"), granted("c", lost=1, at=50.0, token="1-2"))
    log = replace(EMPTY, records=records)
    world = [instance("a"), ended("b"), instance("c")]
    (launch,) = act(world, log, plan=PLAN.resized(4), now=50.5)
    assert isinstance(launch, Launch)
    assert (launch.count, launch.record.lost) == (2, 0)


def test_capacity_that_the_provider_lacks_is_asked_for_with_pauses_and_costs_no_allowance() -> None:
    log = EMPTY
    now = 0.0
    launches = 0
    while now < 3000.0:
        for action in act([], log, now=now):
            if isinstance(action, Launch):
                launches += 1
                log = log.asked(action.record)
                log = log.answered(action.token, LaunchResult(launched=(), shortfall=2, reason="no capacity"))
            else:
                assert isinstance(action, Hold)
                assert action.until is not None
                now = action.until - 1.0
        now += 1.0
    assert 20 < launches < 70


def test_a_call_without_an_answer_is_repeated_with_its_own_token_and_counted_meanwhile() -> None:
    (launch,) = act([])
    assert isinstance(launch, Launch)
    log = EMPTY.asked(launch.record)
    assert act([], log, now=1.0) == ()
    (again,) = act([], log, now=2.0)
    assert isinstance(again, Launch)
    assert (again.token, again.count, again.reason) == ("1-1", 2, "call 2: the one before got no answer")
    log = log.asked(again.record)
    assert act([], log, now=3.0) == ()
    log = log.answered("1-1", LaunchResult(launched=(instance("a"), instance("b"))))
    assert act([instance("a"), instance("b")], log, now=3.0) == ()


def test_surplus_standbys_are_ended_and_the_youngest_that_boots_goes_first() -> None:
    world = [instance("a"), instance("b"), instance("c"), instance("d", InstanceState.PENDING)]
    assert act(world, members={"a"}, plan=PLAN.resized(2)) == (
        Terminate(names=("d", "c"), reason="2 nodes more than planned"),
    )


def test_a_member_of_the_current_generation_is_never_surplus() -> None:
    world = [instance("a"), instance("b"), instance("c")]
    assert act(world, members={"a", "b", "c"}) == (
        Hold(reason="1 node more than planned, in the current generation"),
    )


def test_a_member_is_ended_only_if_the_plan_names_it_and_is_replaced() -> None:
    plan = PLAN.releasing(frozenset({"a"}))
    terminate, launch = act([instance("a"), instance("b")], members={"a", "b"}, plan=plan)
    assert terminate == Terminate(names=("a",), reason="the plan releases them")
    assert isinstance(launch, Launch)
    assert launch.count == 1


def test_a_replacement_waits_where_the_maximum_has_no_room_for_both() -> None:
    plan = replace(PLAN, nodes=4).releasing(frozenset({"a"}))
    world = [instance(name) for name in "abcd"]
    terminate, hold = act(world, members=set("abcd"), plan=plan)
    assert isinstance(terminate, Terminate)
    assert hold == Hold(reason="1 node must end before others are launched")


def test_spares_are_launched_beyond_the_nodes() -> None:
    (launch,) = act([], plan=replace(PLAN, spares=1))
    assert isinstance(launch, Launch)
    assert launch.count == 3


def test_a_job_s_standby_nodes_are_launched_with_it_and_refilled_when_one_was_promoted() -> None:
    plan = plan_cluster(JobSpec(nodes=NodeBounds(min=1, target=2, max=2, standby=1)))
    (launch,) = reconcile(plan, [], log=LaunchLog(owner="1"), members=(), now=0)
    assert isinstance(launch, Launch)
    assert launch.count == 3
    observed = [instance("a"), instance("b"), ended("c")]  # c was a member, b has taken its place
    (refill,) = reconcile(plan, observed, log=LaunchLog(owner="2"), members=("a", "b"), now=0)
    assert isinstance(refill, Launch)
    assert (refill.count, refill.record.lost) == (1, 1)


def test_a_run_adopted_without_its_log_replaces_only_what_is_missing() -> None:
    (launch,) = act([instance("a"), ended("b")], LaunchLog(owner="2"))
    assert isinstance(launch, Launch)
    assert (launch.count, launch.record.lost, launch.token) == (1, 1, "2-1")


def test_an_answer_to_an_unknown_token_is_an_error() -> None:
    with pytest.raises(KeyError, match="9-9"):
        EMPTY.answered("9-9", LaunchResult(launched=()))


def test_where_no_node_is_fit_no_more_are_launched() -> None:
    unfit = [
        ended(name, exit_code=int(ExitCode.UNFIT), detail="pre-flight check 'disk'")
        for name in ("a", "b", "c")
    ]
    log = EMPTY.asked(granted("a", "b", "c"))
    assert act(unfit, log, now=100.0) == (
        GiveUp(
            exit_code=72,
            reason="3 nodes were launched and not one was fit; the last one, c: pre-flight check 'disk'",
        ),
    )
    trained = ended("d", exit_code=75)
    for world in (unfit[:2], [*unfit, instance("d")], [*unfit, trained]):
        assert not any(isinstance(action, GiveUp) for action in act(world, log, now=100.0))
