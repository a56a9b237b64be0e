"""What machines cost, from the record that a flow keeps."""

import pytest

from elastic_core.events.costs import MachineCost, affordable, fold_costs, total_usd

LAUNCH = {"machine": "i-1", "kind": "g5.xlarge", "market": "spot", "usd_per_hour": 0.5, "launched_at": 0.0}


def test_a_machine_costs_its_price_for_as_long_as_it_ran() -> None:
    machines = fold_costs([LAUNCH, {**LAUNCH, "machine": "i-2"}, {"machine": "i-1", "ended_at": 1800.0}])
    assert [machine.usd(3600.0) for machine in machines] == [0.25, 0.5]
    assert total_usd(machines, 3600.0) == 0.75


def test_a_line_told_twice_counts_once_and_a_broken_one_not_at_all() -> None:
    ends = [{"machine": "i-1", "ended_at": 1800.0}, {"machine": "i-1", "ended_at": 3600.0}]
    lines = [LAUNCH, LAUNCH, *ends, {"machine": "i-9", "ended_at": 1.0}, {"usd_per_hour": 1}, {"x": 1}]
    assert [machine.ended_at for machine in fold_costs(lines)] == [1800.0]


@pytest.mark.parametrize(
    ("budget", "machines", "count"),
    [
        (12.0, [], 1),  # 0.5 $ an hour for at most 24 hours
        (11.99, [], 0),
        (36.0, [MachineCost(**LAUNCH)], 2),  # type: ignore[arg-type]
        (36.0, [MachineCost(**LAUNCH, ended_at=3600.0)], 2),  # type: ignore[arg-type]
        (36.5, [MachineCost(**LAUNCH, ended_at=3600.0)], 3),  # type: ignore[arg-type]
    ],
)
def test_a_budget_holds_even_if_all_machines_run_as_long_as_they_may(
    budget: float, machines: list[MachineCost], count: int
) -> None:
    assert affordable(machines, budget=budget, price=0.5, max_hours=24.0, now=7200.0) == count
