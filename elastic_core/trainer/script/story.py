"""What a script's worker tells while it trains: the audit, a line of figures a step, and its agent's view."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from elastic_core.channel import AgentLink, LinkLost
from elastic_core.clock import Clock
from elastic_core.model.messages import ProgressMade, StepsResumed, TrainingFinished, WorkerMessage
from elastic_core.model.progress import Progress, Resumption, RunResult
from elastic_core.trainer.audit_log import AuditLog
from elastic_core.trainer.journal import Journal
from elastic_core.trainer.script.surroundings import Surroundings

_PROGRESS_S: Final = {True: 0.1, False: 1.0}
"""Between two words of rank 0, which people follow, and of another rank."""


class Story:
    """Tells of one worker; nothing in here can fail a training."""

    def __init__(
        self, surroundings: Surroundings, *, attempt: int, environment: Mapping[str, str], clock: Clock
    ) -> None:
        run_dir = surroundings.run_dir
        samples = f"{surroundings.node_id}-{surroundings.local_rank}.jsonl"
        self._surroundings = surroundings
        self._attempt = attempt
        self._clock = clock
        self._audit = AuditLog(Journal(run_dir and run_dir / "samples" / samples), attempt=attempt)
        self._metrics = Journal(run_dir and run_dir / "metrics.jsonl")
        self._link: AgentLink | None = None
        with suppress(LinkLost):  # no agent, or it is gone: the files have to do
            self._link = AgentLink.connect(environment)
        self._told_at = float("-inf")

    @property
    def is_first(self) -> bool:
        """Whether this worker speaks for all."""
        return self._surroundings.rank == 0

    def begin(self, *, step: int, source: str) -> None:
        """Tell where this generation goes on, and from which state."""
        self._audit.generation_started(self._surroundings.generation, step=step, source=source)

    def begin_step(self, *, step: int, epoch: int, ids: Sequence[int]) -> None:
        """Tell which samples were handed out for a step."""
        self._audit.step_begun(epoch=epoch, step=step, ids=ids)

    def end_step(self, progress: Progress, *, step: int, epoch: int, held_up_s: float) -> None:
        """Tell that a step is finished; its figures come from rank 0."""
        self._audit.step_committed(step)
        if self.is_first:
            self._metrics.append(
                {
                    "step": step,
                    "epoch": epoch,
                    "samples": progress.samples,
                    "attempt": self._attempt,
                    "generation": progress.generation,
                    "world_size": self._surroundings.world_size,
                    "wall_time": progress.wall_time,
                    "checkpoint_s": held_up_s,
                    "metrics": dict(progress.metrics),
                }
            )
        now = self._clock.monotonic()
        if now - self._told_at >= _PROGRESS_S[self.is_first]:
            self._told_at = now
            self._send(ProgressMade(progress=progress))

    def resumed(self, resumption: Resumption) -> None:
        """Tell how this generation came to its first step."""
        if self.is_first:
            self._send(StepsResumed(resumption=resumption))

    def finished(self, progress: Progress, result: RunResult) -> None:
        """Tell that the training is complete."""
        if self.is_first:
            self._send(ProgressMade(progress=progress))
            self._send(TrainingFinished(result=result))

    def _send(self, message: WorkerMessage) -> None:
        if self._link is not None:
            try:
                self._link.send(message)
            except LinkLost:
                self._link = None
