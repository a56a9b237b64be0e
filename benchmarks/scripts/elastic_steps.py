"""The same training on the elastic API: a worker keeps process and state when others come and go."""

from __future__ import annotations

import os
import sys
import time

import torch

from benchmarks.scripts.pace import EVERY_STEPS, Diary, pace
from elastic_core.clock import SystemClock
from elastic_core.model.job import CheckpointPolicy
from elastic_core.testing.toy_trainee import ToyJob, ToyTrainee
from elastic_core.trainer.checkpoint import CheckpointDirectory
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.loop import LoopSettings, train
from elastic_core.trainer.session import Session
from elastic_core.trainer.trainee import Reducer, StepReport


class PacedTrainee(ToyTrainee):
    """Takes its time for each step, and writes down what it does."""

    def __init__(self, job: ToyJob, diary: Diary) -> None:
        super().__init__(job)
        self._diary = diary
        self._group: Reducer | None = None

    def set_up(self) -> None:
        """Build the model."""
        super().set_up()
        self._diary.note("ready")

    def train_step(self, reducer: Reducer) -> StepReport:
        """Do one step."""
        place = {"rank": reducer.rank, "world": reducer.world_size}
        if reducer is not self._group:
            self._group = reducer
            self._diary.note("formed", **place)
        began = time.monotonic()
        report = super().train_step(reducer)
        pace(began)
        self._diary.note("step", step=report.step, **place)
        return report


def main() -> int:
    """Train until killed."""
    torch.set_num_threads(1)
    diary = Diary()
    policy = CheckpointPolicy(every_steps=EVERY_STEPS)
    clock = SystemClock()
    with Session.connect(os.environ, clock=clock) as session:
        end = train(
            PacedTrainee(ToyJob(epochs=1_000_000, samples=4096, batch_size=64, hidden=128), diary),
            session,
            settings=LoopSettings.from_environment(os.environ, checkpoint=policy, audit=False),
            writer=CheckpointWriter(CheckpointDirectory(diary.directory / "checkpoints"), clock=clock),
            clock=clock,
        )
    return int(end.value)


if __name__ == "__main__":
    sys.exit(main())
