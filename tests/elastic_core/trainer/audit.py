"""Reads the audit of a run as the report does: which samples the model has seen, and what was done twice."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Audit:
    """What a run's surviving lineage trained.

    Attributes:
        ids: How often each id was trained, by epoch.
        repeated_steps: Steps that were committed by more than one generation.
    """

    ids: dict[int, Counter[int]]
    repeated_steps: list[int]

    def is_exactly_once(self, samples: int, epochs: int) -> bool:
        return self.ids == {epoch: Counter(range(samples)) for epoch in range(epochs)}


def read_lines(run_dir: Path, node: str = "*") -> list[dict[str, Any]]:
    paths = (run_dir / "samples").glob(f"{node}-0.jsonl")
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def read_audit(run_dir: Path) -> Audit:
    lines = read_lines(run_dir)
    commits: dict[int, set[tuple[int, int]]] = {}
    for line in lines:
        if "c" in line:
            commits.setdefault(line["c"], set()).add((line["a"], line["g"]))
    ids: dict[int, Counter[int]] = {}
    for line in lines:
        if "s" in line and commits.get(line["s"]) and (line["a"], line["g"]) == max(commits[line["s"]]):
            ids.setdefault(line["e"], Counter()).update(line["ids"])
    return Audit(ids, sorted(step for step, by in commits.items() if len(by) > 1))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "metrics" in line]
