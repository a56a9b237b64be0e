"""Run the property suite against planted bugs, and say which property found each."""

from __future__ import annotations

import contextlib
import functools
import io
import time
from collections.abc import Callable
from dataclasses import dataclass

from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from tests.elastic_core.planning.test_reconciliation_properties import (
    test_s11_the_cluster_never_exceeds_its_maximum_and_reaches_its_plan as planning_property,
)
from tests.elastic_core.rendezvous.machines import SETTINGS, BoundedWait, FreeTicks, WakeOnly
from tests.mutants.catalog import MUTANTS, Mutant

DRIVERS: tuple[type[RuleBasedStateMachine], ...] = (BoundedWait, WakeOnly, FreeTicks)

ROUNDS = (30, 300)
"""Examples of each driver: most bugs are found in the first round, whichever driver finds them."""

# The same examples each time: a mutant that is found today is found tomorrow.
HUNT = settings(
    SETTINGS,
    stateful_step_count=40,
    derandomize=True,
    print_blob=False,
    phases=(Phase.explicit, Phase.generate),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Find:
    """What found a bug.

    Attributes:
        evidence: The first line of the violated property.
    """

    driver: str
    evidence: str
    seconds: float


def run_driver(machine: type[RuleBasedStateMachine], examples: int) -> None:
    """Run one driver with the hunt's settings; its story is not printed."""
    with contextlib.redirect_stdout(io.StringIO()):
        run_state_machine_as_test(machine, settings=settings(HUNT, max_examples=examples))


def _checks(mutant: Mutant) -> list[tuple[str, Callable[[], None]]]:
    if mutant.is_planning:
        return [("planning", planning_property)]
    return [
        (driver.__name__, functools.partial(run_driver, driver, examples))
        for examples in ROUNDS
        for driver in DRIVERS
    ]


def hunt(mutant: Mutant) -> Find | None:
    """Return what finds the mutant first, or None."""
    begun = time.perf_counter()
    with mutant.planted():
        for name, check in _checks(mutant):
            try:
                check()
            except Exception as error:  # a bug may show as any error
                evidence = str(error).splitlines()[0] if str(error) else ""
                return Find(
                    driver=name,
                    evidence=f"{type(error).__name__} {evidence}"[:120],
                    seconds=time.perf_counter() - begun,
                )
    return None


def find_mutant(name: str) -> Mutant:
    """Return a mutant by its name."""
    return next(mutant for mutant in MUTANTS if mutant.name == name)
