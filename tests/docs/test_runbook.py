"""The runbook has an answer for everything that a run can end with or show."""

from __future__ import annotations

import pytest

from elastic_core.exits import ExitCode
from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.node import NodePhase
from tests.docs.sources import ROOT

TEXT = (ROOT / "docs" / "operations.md").read_text()


@pytest.mark.parametrize("code", list(ExitCode), ids=lambda code: str(int(code)))
def test_every_exit_code_has_a_row(code: ExitCode) -> None:
    assert f"\n| {int(code)} |" in TEXT or f"\n| {int(code)}, " in TEXT


@pytest.mark.parametrize("cause", list(Cause))
def test_every_cause_of_a_generation_has_a_row(cause: Cause) -> None:
    assert f"\n| `{cause}` |" in TEXT


@pytest.mark.parametrize("word", [*Outcome, *NodePhase])
def test_every_outcome_and_phase_is_named(word: str) -> None:
    assert f"`{word}`" in TEXT
