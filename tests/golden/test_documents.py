"""The protocol's page says what the code does."""

from tests.golden.documents import PROTOCOL, mutants_named, with_rules
from tests.mutants.catalog import MUTANTS


def test_the_table_of_rules_is_that_of_the_code() -> None:
    text = PROTOCOL.read_text()
    assert with_rules(text) == text


def test_every_invariant_names_the_mutants_that_break_it() -> None:
    text = PROTOCOL.read_text()
    rows = {line.split("|")[1].strip(): line for line in text.splitlines() if line.startswith("| ")}
    for mutant in MUTANTS:
        if mutant.breaks in rows:
            assert f"`{mutant.name}`" in rows[mutant.breaks]
    assert mutants_named(text) == {mutant.name for mutant in MUTANTS if mutant.breaks in rows}
