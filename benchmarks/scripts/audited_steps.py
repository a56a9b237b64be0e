"""A training whose every sample is on record: gloo, a state in memory, checkpoints; until it is stopped."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch

from elastic_core.clock import SystemClock
from elastic_core.model.job import CheckpointPolicy
from elastic_core.testing.toy_trainee import ToyJob, ToyTrainee
from elastic_core.trainer.checkpoint import CheckpointDirectory
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.loop import LoopSettings, train
from elastic_core.trainer.session import Session
from elastic_core.trainer.trainee import Reducer, StepReport

STEP_S = 0.04
SAMPLES = 60


class PacedTrainee(ToyTrainee):
    """Takes its time for each step."""

    def train_step(self, reducer: Reducer) -> StepReport:
        """Do one step."""
        began = time.monotonic()
        report = super().train_step(reducer)
        time.sleep(max(0.0, began + STEP_S - time.monotonic()))
        return report


def main() -> int:
    """Train until stopped."""
    torch.set_num_threads(1)
    clock = SystemClock()
    directory = CheckpointDirectory(Path(os.environ["ELASTIC_RUN_DIR"]) / "checkpoints")
    with Session.connect(os.environ, clock=clock) as session:
        end = train(
            PacedTrainee(ToyJob(epochs=1_000_000, samples=SAMPLES, batch_size=8, shards=8)),
            session,
            settings=LoopSettings.from_environment(
                os.environ, checkpoint=CheckpointPolicy(every_steps=20), timeout_s=60.0
            ),
            writer=CheckpointWriter(directory, clock=clock),
            clock=clock,
        )
    return int(end.value)


if __name__ == "__main__":
    sys.exit(main())
