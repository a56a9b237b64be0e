"""Faults on purpose, for demonstrations."""

from __future__ import annotations

from pathlib import Path

from elastic_core.errors import RefusedInput
from elastic_core.ids import RunId
from elastic_core.model.job import DockerPool, JobSpec, LocalPool


def kill_node(job: JobSpec, runs: Path, run: RunId, name: str) -> None:
    """End everything of a node at once and without a word, as a power cut would.

    Raises:
        RefusedInput: Nodes of this pool cannot be killed from here.
    """
    match job.pool:
        case LocalPool():
            from tasks.providers.local import LocalProvider

            LocalProvider(runs).kill(run, name)
        case DockerPool() as pool:
            from tasks.providers.docker import DockerProvider

            DockerProvider(runs, pool).kill(run, name)
        case _:
            raise RefusedInput([f"pool.kind: nodes of {job.pool.kind!r} cannot be killed from here"])
