"""A worker of the elastic API without torch: it counts steps, and sees dead peers as a collective would.

elastic_stub.py DIRECTORY --steps N: the state is the step; joiners take it from a file that rank 0
writes, as they would take it from a peer. A file `enough` ends the training.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from elastic_core.channel import AgentLink
from elastic_core.ids import NodeId
from elastic_core.model.failure import Failure
from elastic_core.model.messages import (
    EnterGeneration,
    GenerationLeft,
    GroupBroken,
    LeaveGeneration,
    ProgressMade,
    StepsResumed,
    StopTraining,
    TrainingFinished,
    WorkerAttached,
    WorkerFailed,
    WorkerReady,
)
from elastic_core.model.progress import Progress, Resumption, RunResult
from elastic_core.pulse import Doing, Pulse

STEP_S = 0.02


class Stub:
    def __init__(self, options: argparse.Namespace) -> None:
        self.directory = Path(options.directory)
        self.steps = options.steps
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.link = AgentLink.connect()
        self.pulse = Pulse.of(os.environ)
        self.part: EnterGeneration | None = None
        self.step = 0
        self.told_at = 0.0
        self.broken = 0

    def run(self) -> None:
        self.link.send(WorkerAttached(local_rank=self.local_rank, pid=os.getpid()))
        if (self.directory / f"refuse-{os.environ['ELASTIC_NODE_ID'].split('.')[0]}").exists():
            raise RuntimeError("set-up refused")
        self.link.send(WorkerReady())
        while True:
            message = self.link.receive(STEP_S if self.part else None)
            match message:
                case EnterGeneration():
                    self.enter(message)
                case LeaveGeneration(generation=number):
                    self.leave(number, saved=False)
                case StopTraining(save=save):
                    self.leave(self.number, saved=save)
                    return None
                case None:
                    self.train()
            if self.step >= self.steps or (self.part and (self.directory / "enough").exists()):
                return self.finish()

    @property
    def number(self) -> int:
        return self.part.generation.number if self.part else 0

    @property
    def rank(self) -> int:
        return self.part.assignment.first_rank + self.local_rank if self.part else -1

    def enter(self, message: EnterGeneration) -> None:
        before, self.part = self.step, message
        self.pulse.do(Doing.OTHER)
        saved = self.directory / "step"
        if self.step == 0 and saved.exists():
            self.step = int(saved.read_text() or "0")
        pids = self.directory / "pids" / str(self.number)
        pids.mkdir(parents=True, exist_ok=True)
        (pids / str(self.rank)).write_text(str(os.getpid()))
        self.note("entered", before=before)
        if self.rank == 0:
            now = time.time()
            self.link.send(
                StepsResumed(
                    resumption=Resumption(
                        generation=self.number, last_step_at=0, noticed_at=0, assigned_at=now, formed_at=now,
                        synced_at=now, first_step_at=now, step_before=before - 1, step_resumed=self.step,
                        source="memory" if before else "fresh",
                    )
                )
            )  # fmt: skip

    def leave(self, number: int, *, saved: bool) -> None:
        self.save()
        self.note("left", saved=saved)
        self.part = None
        self.pulse.do(Doing.NOTHING)
        self.link.send(GenerationLeft(generation=number, step=self.step, saved=saved))

    def train(self) -> None:
        if self.broken == self.number:
            return
        if self.has_dead_peer():
            self.broken = self.number
            self.note("broken")
            self.link.send(GroupBroken(generation=self.number, step=self.step, error="peer is gone"))
            return
        self.pulse.begin_step(self.step)
        self.compute()
        self.pulse.end_step()
        self.step += 1
        self.save()
        if time.monotonic() - self.told_at > 0.1:
            self.told_at = time.monotonic()
            self.tell()
        fault = self.directory / f"fail-{self.rank}"
        if fault.exists():
            fault.unlink()
            self.fail()

    def compute(self) -> None:
        hang = self.directory / f"hang-{self.rank}"
        if hang.exists():
            hang.unlink()
            time.sleep(3600)  # the line that a stack must name

    def tell(self) -> None:
        progress = Progress(
            generation=self.number, epoch=0, step=self.step, samples=self.step, total_steps=self.steps
        )
        self.link.send(ProgressMade(progress=progress))

    def fail(self) -> None:
        failure = Failure(
            node_id=NodeId(""), generation=self.number, rank=self.rank, local_rank=self.local_rank,
            exit_code=3, message="ValueError: bad label 7", location="stub.py:1", step=self.step,
            started=True,
        )  # fmt: skip
        self.link.send(WorkerFailed(failure=failure))
        os._exit(3)

    def has_dead_peer(self) -> bool:
        pids = self.directory / "pids" / str(self.number)
        return any(
            is_dead(int(path.read_text() or "0")) for path in pids.iterdir() if path.name != str(self.rank)
        )

    def finish(self) -> None:
        # Whoever has finished is not missed: peers that are a step behind may see this process gone.
        (self.directory / "pids" / str(self.number) / str(self.rank)).write_text("0")
        self.tell()
        self.note("finished")
        if self.rank == 0:
            self.link.send(TrainingFinished(result=RunResult(epochs=1, steps=self.step, samples=self.step)))

    def save(self) -> None:
        if self.rank == 0:
            draft = self.directory / f"step.{os.getpid()}"
            draft.write_text(str(self.step))
            draft.replace(self.directory / "step")

    def note(self, what: str, **facts: object) -> None:
        line = {
            "what": what,
            "g": self.number,
            "rank": self.rank,
            "step": self.step,
            "pid": os.getpid(),
            **facts,
        }
        name = f"{os.environ['ELASTIC_NODE_ID']}-{self.local_rank}.jsonl"
        with (self.directory / name).open("a") as log:
            log.write(json.dumps(line) + "\n")


def is_dead(pid: int) -> bool:
    if not pid:
        return False
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--steps", type=int, default=10_000)
    Stub(parser.parse_args()).run()
