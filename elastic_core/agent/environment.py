"""The variables that workers see: torchrun's contract, and ours beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_core.agent.address import INTERFACE
from elastic_core.agent.events import GenerationPublished
from elastic_core.agent.process import STACK_FILE
from elastic_core.agent.pulse_watch import pulse_file, stack_file
from elastic_core.ids import NodeId, RunId
from elastic_core.pulse import PULSE_FILE

_NOT_FOR_WORKERS: Final = ("PREFECT_", "PET_", "ELASTIC_STORE_")
"""What steers the agent or the orchestrator has no meaning, and credentials no place, in a worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """What the workers of a node are told beside their ranks.

    Attributes:
        run_dir: Shared directory of the run, "" for none.
        job: Path of the job's JSON, "" for none.
        attempt: Counts the launches of the run: the first half of the fence token.
        interface: Network interface for gloo, "" to let it choose.
        errors: Directory for torch's error files, pulses and stacks.
    """

    run: RunId
    slots: int
    run_dir: str
    job: str
    attempt: int
    role: str
    max_restarts: int
    interface: str
    errors: Path


def base_environment(settings: WorkerSettings, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return what all workers of a node share, as the base of everything they see."""
    kept = {name: value for name, value in inherited.items() if not name.startswith(_NOT_FOR_WORKERS)}
    interface = {INTERFACE: settings.interface} if settings.interface else {}
    return {
        "OMP_NUM_THREADS": "1",
        **interface,
        **kept,
        "ELASTIC_RUN_ID": settings.run,
        "ELASTIC_RUN_DIR": settings.run_dir,
        "ELASTIC_JOB": settings.job,
        "ELASTIC_ATTEMPT": str(settings.attempt),
        "LOCAL_WORLD_SIZE": str(settings.slots),
        "TORCHELASTIC_RUN_ID": settings.run,
        "TORCHELASTIC_MAX_RESTARTS": str(settings.max_restarts),
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def worker_environment(
    settings: WorkerSettings, node_id: NodeId, local_rank: int, part: GenerationPublished | None
) -> dict[str, str]:
    """Return what one worker sees of its own; outside of a generation it has no rank."""
    error_file = settings.errors / f"worker-{local_rank}.json"
    own = {
        "ELASTIC_NODE_ID": node_id,
        "LOCAL_RANK": str(local_rank),
        "TORCHELASTIC_ERROR_FILE": str(error_file),
        PULSE_FILE: str(pulse_file(settings.errors, local_rank)),
        STACK_FILE: str(stack_file(settings.errors, local_rank)),
    }
    if part is None or part.assignment is None:
        return own
    generation, assignment = part.generation, part.assignment
    rank, world = str(assignment.first_rank + local_rank), str(generation.world_size)
    return {
        **own,
        "ELASTIC_GENERATION": str(generation.number),
        "RANK": rank,
        "WORLD_SIZE": world,
        "GROUP_RANK": str(assignment.group_rank),
        "GROUP_WORLD_SIZE": str(generation.group_world_size),
        "ROLE_NAME": settings.role,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": world,
        "MASTER_ADDR": generation.master_address,
        "MASTER_PORT": str(generation.master_port),
        "TORCHELASTIC_RESTART_COUNT": str(generation.restart_count),
    }
