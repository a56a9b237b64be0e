"""`python -m tests.mutants [NAME…]`: hunt the planted bugs; exit 1 if one gets away."""

import sys
from collections.abc import Callable

from tests.mutants.catalog import MUTANTS
from tests.mutants.hunt import DRIVERS, ROUNDS, find_mutant, hunt, run_driver


def main(names: list[str], say: Callable[[str], object]) -> int:
    """Hunt all mutants or the named ones, after the suite has passed without any."""
    for driver in DRIVERS:
        run_driver(driver, ROUNDS[-1])
        say(f"{driver.__name__} holds without a planted bug\n")
    escaped = 0
    for mutant in [find_mutant(name) for name in names] or MUTANTS:
        find = hunt(mutant)
        escaped += find is None
        found = f"{find.seconds:5.1f} s  {find.driver}: {find.evidence}" if find else "GOT AWAY"
        say(f"{mutant.breaks:9}{mutant.name:36}{found}\n")
        sys.stdout.flush()
    say(f"{escaped} got away\n")
    return 1 if escaped else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], sys.stdout.write))
