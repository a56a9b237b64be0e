"""A worker process that trains a small job on the elastic loop, and misbehaves where a test says so."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from elastic_core.clock import SystemClock
from elastic_core.model.job import CheckpointPolicy
from elastic_core.trainer.checkpoint import CheckpointDirectory
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.loop import LoopSettings, train
from elastic_core.trainer.session import Session
from elastic_core.trainer.trainee import Trainee


@dataclass(frozen=True, slots=True)
class Act:
    """What a worker does before it computes a step, the first time it comes there.

    Attributes:
        kind: "die" and "freeze" by signal, "raise" an error, "hold" until `gate` is opened for writing,
            "throttle": take `seconds` longer for this step and all that follow.
        gate: A named pipe.
    """

    step: int
    kind: Literal["die", "freeze", "raise", "hold", "throttle"]
    gate: str = ""
    seconds: float = 0.0

    def perform(self) -> None:
        """Do it."""
        match self.kind:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "raise":
                raise ValueError(f"bad label in step {self.step}")
            case "hold":
                Path(self.gate).read_bytes()


class TraineeJob(Protocol):
    """What a worker trains; it crosses to another process."""

    def trainee(self, before_step: Callable[[int], None]) -> Trainee:
        """Return the training, which calls back before it computes a step."""
        ...


def run(
    environment: Mapping[str, str], job: TraineeJob, policy: CheckpointPolicy, acts: tuple[Act, ...]
) -> None:
    """Be the worker; ends the process with the loop's exit code."""
    torch.set_num_threads(1)
    os.environ.update(environment)
    log = os.open(environment["TOY_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    pending = {act.step: act for act in acts}
    held_up_s = 0.0

    def before_step(step: int) -> None:
        nonlocal held_up_s
        act = pending.pop(step, None)
        if act is not None:
            act.perform()
            held_up_s = act.seconds or held_up_s
        time.sleep(held_up_s)

    clock = SystemClock()
    settings = LoopSettings.from_environment(
        environment, checkpoint=policy, resume=environment.get("TOY_RESUME", "auto")
    )
    directory = CheckpointDirectory(Path(policy.directory), keep=policy.keep)
    with Session.connect(environment, clock=clock) as session:
        end = train(
            job.trainee(before_step),
            session,
            settings=settings,
            writer=CheckpointWriter(directory, clock=clock),
            clock=clock,
        )
    sys.exit(int(end.value))
