"""Where a script runs: under this product's agent, under plain torchrun, or alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from elastic_core.channel import SNAPSHOT_MEMORY
from elastic_core.model.job import CheckpointPolicy, JobSpec
from elastic_core.model.job_file import load_job


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the environment says of this worker.

    Attributes:
        attempt: How often the run was launched; 0 where nobody counts.
        run_dir: Where records and checkpoints go, None: nowhere.
        memory: The descriptors of memory that outlives this process, "" for none.
    """

    rank: int
    local_rank: int
    world_size: int
    node_id: str
    attempt: int
    generation: int
    run_dir: Path | None
    checkpoint: CheckpointPolicy
    resume: Literal["auto", "require", "never"]
    memory: str

    @classmethod
    def of(cls, environment: Mapping[str, str], directory: Path | None) -> Self:
        """Read the environment; `directory` takes the place of a run's directory where there is none."""
        run_dir, job = environment.get("ELASTIC_RUN_DIR", ""), _job(environment)
        group = environment.get("GROUP_RANK", "0")
        return cls(
            rank=int(environment.get("RANK", "0")),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            world_size=int(environment.get("WORLD_SIZE", "1")),
            node_id=environment.get("ELASTIC_NODE_ID") or f"node-{group}",
            attempt=int(environment.get("ELASTIC_ATTEMPT", "0")),
            generation=int(environment.get("ELASTIC_GENERATION", "0")),
            run_dir=Path(run_dir) if run_dir else directory,
            checkpoint=job.checkpoint,
            resume=job.resume,
            memory=environment.get(SNAPSHOT_MEMORY, ""),
        )

    @property
    def checkpoints(self) -> str | None:
        """The directory or URL of the durable checkpoints, None for none."""
        if self.checkpoint.directory:
            return self.checkpoint.directory
        return str(self.run_dir / "checkpoints") if self.run_dir is not None else None


def _job(environment: Mapping[str, str]) -> JobSpec:
    path = environment.get("ELASTIC_JOB", "")
    return load_job(Path(path)) if path else JobSpec()
