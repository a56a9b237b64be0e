"""The parts of `docs/protocol.md` that are made from code."""

import re
from pathlib import Path

from elastic_core.rendezvous.rules import RULES
from tests.mutants.catalog import MUTANTS

PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
_RULES = re.compile(r"(?<=<!-- rules -->\n).*(?=<!-- end of rules -->)", re.DOTALL)


def rules_table() -> str:
    """Return the coordinator's rules in their order, each with its first sentence."""
    rows = []
    for number, rule in enumerate(RULES, start=1):
        sentence = (rule.__doc__ or "").strip().splitlines()[0]
        rows.append(f"| {number} | {rule.__name__.replace('_', ' ')} | {sentence} |")
    return "\n".join(["| # | rule | says |", "|---|---|---|", *rows, ""])


def with_rules(text: str) -> str:
    """Return the document with today's table."""
    return _RULES.sub(lambda _: rules_table(), text)


def mutants_named(text: str) -> set[str]:
    """Return the mutants that the table of invariants names."""
    known = {mutant.name for mutant in MUTANTS}
    return {word for word in re.findall(r"`([a-z0-9-]+)`", text) if word in known}
