"""Faults on purpose, for demonstrations."""

from __future__ import annotations

from pathlib import Path

from elastic_core.ids import RunId
from tasks.providers.local import LocalProvider


def kill_local_node(runs: Path, run: RunId, name: str) -> None:
    """SIGKILL all processes of a local node."""
    LocalProvider(runs).kill(run, name)
