"""Every planted bug is found; `python -m tests.mutants` prints which property found it."""

import pytest

from tests.mutants.catalog import MUTANTS, Mutant
from tests.mutants.hunt import find_mutant, hunt


@pytest.mark.parametrize("name", ["number-skips", "newcomers-come-first", "wake-ups-are-lost"])
def test_a_plain_bug_is_found_at_once(name: str) -> None:
    assert hunt(find_mutant(name)) is not None


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_every_planted_bug_is_found(mutant: Mutant) -> None:
    assert hunt(mutant) is not None


def test_a_planted_bug_is_gone_after_the_hunt() -> None:
    mutant = find_mutant("number-skips")
    owner, attribute, _ = mutant.plant()
    before = owner.__dict__[attribute]
    with mutant.planted():
        assert owner.__dict__[attribute] is not before
    assert owner.__dict__[attribute] is before
