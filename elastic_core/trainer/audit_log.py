"""What one worker trained, id by id: the raw material to show that each sample was trained once.

{"g": 3, "a": 1, "from": 120, "source": "memory"}      the generation starts at this step
{"g": 3, "a": 1, "e": 2, "s": 120, "ids": [7, 1]}      before the step's reduction
{"g": 3, "a": 1, "c": 120}                             after the optimizer's step
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_core.trainer.journal import Journal


class AuditLog:
    """Writes the audit of one worker process, generation after generation."""

    def __init__(self, journal: Journal, *, attempt: int) -> None:
        self._journal = journal
        self._attempt = attempt
        self._generation = 0

    def generation_started(self, generation: int, *, step: int, source: str) -> None:
        """Note that a generation goes on at a step, with a state from "memory", "checkpoint" or "fresh"."""
        self._generation = generation
        self._journal.append({**self._key(), "from": step, "source": source})

    def step_begun(self, *, epoch: int, step: int, ids: Sequence[int]) -> None:
        """Note what is about to be trained; without `step_committed` it was not."""
        self._journal.append({**self._key(), "e": epoch, "s": step, "ids": list(ids)})

    def step_committed(self, step: int) -> None:
        """Note that the step has changed the model."""
        self._journal.append({**self._key(), "c": step})

    def _key(self) -> dict[str, int]:
        return {"g": self._generation, "a": self._attempt}
