"""The elastic loop: one process trains through any number of generations.

In each it takes the newest state there is (a survivor's memory before a checkpoint,
a checkpoint before a fresh start), does steps until all ranks agree to leave
or the group breaks, and waits for the next. A rank that had finished a step
when the others failed is as good a source as any: its state is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, Final, Literal

import structlog

from elastic_core.clock import Clock
from elastic_core.errors import RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.ids import NodeId
from elastic_core.model.job import CheckpointPolicy
from elastic_core.model.membership import Cause
from elastic_core.model.progress import Progress, Resumption, RunResult, SlowWorker
from elastic_core.pulse import Doing
from elastic_core.trainer.audit_log import AuditLog
from elastic_core.trainer.checkpoint import Checkpoint, Manifest, Token
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.group import Backend, Group, GroupBroken
from elastic_core.trainer.interval import CheckpointInterval
from elastic_core.trainer.journal import Journal
from elastic_core.trainer.pace import Load, PaceDetector
from elastic_core.trainer.session import FOLLOWER_PROGRESS_S, PROGRESS_S, Order, Session
from elastic_core.trainer.trainee import StepReport, Trainee

_SAVE_S: Final = 120.0
"""Seconds for a checkpoint that is waited for; the agent's grace may be shorter."""

log = structlog.get_logger(__name__)


class TrainingEnd(Enum):
    """How the loop ended, when it ended well."""

    FINISHED = ExitCode.OK
    STOPPED = ExitCode.PREEMPTED
    """At a step boundary, on request: the next start goes on from there."""


class _Source(IntEnum):
    """Where a generation's state comes from."""

    FRESH = 0
    MEMORY = 1
    CHECKPOINT = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What a worker must know beside its trainee.

    Attributes:
        attempt: How often this run was launched before, the higher part of the fence token.
        run_dir: Directory of the run, for metrics, audit and model; None: nothing is written.
        resume: "auto": from the newest checkpoint if there is one; "require": there must be one;
            "never": only from checkpoints of this attempt.
        config: Digest of what decides what is learned, for the manifest.
        timeout_s: A collective that takes longer is broken.
    """

    node_id: str
    local_rank: int
    attempt: int
    run_dir: Path | None
    checkpoint: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    resume: Literal["auto", "require", "never"] = "auto"
    audit: bool = True
    config: str = ""
    backend: Backend = "gloo"
    timeout_s: float = 600.0

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **settings: Any) -> LoopSettings:
        """Return the settings of the worker that the agent's variables describe."""
        run_dir = environment.get("ELASTIC_RUN_DIR", "")
        return cls(
            node_id=environment.get("ELASTIC_NODE_ID", "node"),
            local_rank=int(environment.get("LOCAL_RANK", "0")),
            attempt=int(environment.get("ELASTIC_ATTEMPT", "0")),
            run_dir=Path(run_dir) if run_dir else None,
            **settings,
        )


@dataclass(slots=True)
class _Times:
    """Wall-clock times of one change of generation, for its report."""

    last_step: float = 0.0
    noticed: float = 0.0
    assigned: float = 0.0
    formed: float = 0.0
    synced: float = 0.0
    step_before: int = -1
    is_reported: bool = False


class ElasticLoop:
    """Trains one trainee in one worker process."""

    def __init__(
        self,
        trainee: Trainee,
        session: Session,
        *,
        settings: LoopSettings,
        writer: CheckpointWriter | None,
        clock: Clock,
    ) -> None:
        """Prepare the loop.

        Args:
            trainee: Not set up yet.
            session: Connected to the agent.
            settings: See there.
            writer: Writes durable checkpoints; None: none are written or read.
            clock: For reports and for the checkpoints' interval.
        """
        self._trainee = trainee
        self._session = session
        self._settings = settings
        self._writer = writer
        self._clock = clock
        self._samples = 0
        self._worlds: list[list[int]] = []
        self._has_state = False
        self._source = _Source.FRESH
        self._manifest = Manifest(step=0, attempt=settings.attempt, generation=0, config=settings.config)
        self._may_write = False
        self._saved_step = -1
        self._interval = CheckpointInterval(
            settings.checkpoint, now=clock.monotonic(), failures=max(0, settings.attempt - 1)
        )
        self._held_up_s = 0.0
        self._times = _Times()
        self._node = 0
        self._pace = PaceDetector()
        run_dir = settings.run_dir
        name = f"{settings.node_id}-{settings.local_rank}.jsonl"
        samples = run_dir / "samples" / name if run_dir and settings.audit else None
        self._audit = AuditLog(Journal(samples), attempt=settings.attempt)
        self._metrics = Journal(run_dir / "metrics.jsonl" if run_dir else None)

    def run(self) -> TrainingEnd:
        """Set the trainee up and train until the job is complete or a stop was asked for.

        Raises:
            LinkLost: The agent is gone.
            StaleGeneration: A newer generation claimed the checkpoints.
        """
        self._trainee.set_up()
        if self._writer is not None:
            self._writer.reserve(self._state())
        self._session.ready()
        while (order := self._session.next_order(self._trainee.step)) is not None:
            if self._live(order):
                return TrainingEnd.FINISHED
        return self._stop()

    def _live(self, order: Order) -> bool:
        """Go through one generation; return whether the job is complete."""
        group: Group | None = None
        self._times.assigned = order.received_at
        self._node = order.message.assignment.group_rank
        self._session.pulse.do(Doing.OTHER)
        if order.message.generation.cause in (Cause.LOSS, Cause.FAILURE):
            self._interval.broke()
        try:
            group = self._session.enter(
                order, backend=self._settings.backend, timeout_s=self._settings.timeout_s
            )
            self._times.formed = self._clock.wall()
            self._begin(group)
            return self._train(group)
        except GroupBroken as error:
            self._times.noticed = self._clock.wall()
            log.info("group broken", generation=order.number, step=self._trainee.step, why=str(error))
            self._session.report_broken(order.number, self._trainee.step, str(error))
            return False
        finally:
            self._session.pulse.do(Doing.NOTHING)
            if group is not None:
                self._session.leave(group)

    # ---- the beginning of a generation -------------------------------------------------------

    def _begin(self, group: Group) -> None:
        self._may_write = group.rank == 0
        self._manifest = replace(self._manifest, generation=group.seat.generation)
        has_claimed = False
        if self._writer is not None and self._may_write:
            owner = f"{self._settings.node_id}-{self._settings.local_rank}"
            has_claimed = self._writer.claim(self._token(group), owner)
        self._synchronise(group, has_claimed=has_claimed)
        step = self._trainee.step
        self._worlds.append([group.seat.generation, self._settings.attempt, group.world_size, step])
        self._times.synced = self._clock.wall()
        self._times.is_reported = False
        self._interval.saved(self._clock.monotonic())
        self._audit.generation_started(group.seat.generation, step=step, source=self._source.name.lower())
        log.info(
            "generation entered",
            generation=group.seat.generation,
            rank=group.rank,
            world_size=group.world_size,
            step=step,
            source=self._source.name.lower(),
        )

    def _token(self, group: Group) -> Token:
        return Token(self._settings.attempt, group.seat.generation)

    def _synchronise(self, group: Group, *, has_claimed: bool) -> None:
        """Bring all ranks to the newest state that any of them, or the checkpoints, have."""
        own = self._trainee.step if self._has_state else -1
        told = group.exchange([own, int(has_claimed)])
        if self._writer is not None and told[0][1]:
            self._writer.check_shared(self._token(group))
        steps = [step for step, _ in told]
        highest = max(steps)
        checkpoint = self._newest_checkpoint(highest) if group.rank == 0 else None
        if checkpoint is not None:
            self._load(checkpoint.state)
            source = _Source.CHECKPOINT
        else:
            source = _Source.MEMORY if highest >= 0 else _Source.FRESH
        self._source = source = _Source(group.exchange([source])[0][0])
        self._times.step_before = highest - 1
        if source is not _Source.MEMORY or any(step != highest for step in steps):
            giver = steps.index(highest) if source is _Source.MEMORY else 0
            state = group.broadcast_state(self._state() if group.rank == giver else None, source=giver)
            if group.rank != giver and not (source is _Source.MEMORY and own == highest):
                self._load(state)
        self._has_state = True

    def _newest_checkpoint(self, above: int) -> Checkpoint | None:
        if self._writer is None:
            return None
        resume = self._settings.resume
        attempt = self._settings.attempt if resume == "never" else 0
        try:
            checkpoint = self._writer.directory.newest(above=above, attempt=attempt)
        except OSError as error:
            if above < 0:
                raise
            log.warning("checkpoints cannot be read, going on from memory", why=str(error))
            return None
        if checkpoint is None and above < 0:
            if resume == "require":
                self._writer.directory.require()
                raise RefusedInput(
                    [f"checkpoint.directory: no checkpoint in {self._writer.directory.location!r} is whole"]
                )
            log.info("no checkpoint, starting at step 0", directory=self._writer.directory.location)
        return checkpoint

    def _state(self) -> dict[str, Any]:
        loop = {"samples": self._samples, "worlds": self._worlds}
        return {"trainee": self._trainee.state_dict(), "loop": loop}

    def _load(self, state: Mapping[str, Any]) -> None:
        self._trainee.load_state_dict(state["trainee"])
        self._samples = state["loop"]["samples"]
        self._worlds = [list(world) for world in state["loop"]["worlds"]]

    # ---- steps -------------------------------------------------------------------------------

    def _train(self, group: Group) -> bool:
        """Do steps until the job is complete (True) or all ranks agreed to leave (False)."""
        trainee = self._trainee
        while True:
            if trainee.evaluation_due():
                self._evaluate(group)
            elif trainee.step >= trainee.total_steps:
                self._finish(group)
                return True
            else:
                self._step(group)
            is_complete = trainee.step >= trainee.total_steps and not trainee.evaluation_due()
            if group.agreed and not is_complete:
                self._depart(group)
                return False

    def _step(self, group: Group) -> None:
        trainee = self._trainee
        step, start = trainee.step, self._clock.monotonic()
        self._session.pulse.begin_step(step)
        ids = trainee.sample_ids(group)
        if self._settings.audit:
            self._audit.step_begun(epoch=trainee.epoch, step=step, ids=ids)
        report = trainee.train_step(group)
        self._session.pulse.end_step()
        self._compare(group, step)
        group.load = Load(self._session.pulse.work, len(ids), self._node)
        if self._settings.audit:
            self._audit.step_committed(step)
        self._samples += report.samples
        speed = report.samples / max(self._clock.monotonic() - start, 1e-9)
        if group.rank == 0:
            self._tell_step(group, report, speed)
        else:
            self._tell_progress(group, "train", {}, every_s=FOLLOWER_PROGRESS_S)
        self._times.last_step = self._clock.wall()
        if self._writer is not None and group.rank == 0 and not group.agreed:
            self._save_if_due(self._writer)

    def _compare(self, group: Group, step: int) -> None:
        """Judge this worker's pace by what the step before took of all, and tell a change."""
        pace = self._pace.look(group.loads, group.rank)
        if pace is None:
            return
        slow = SlowWorker(
            node_id=NodeId(self._settings.node_id),
            rank=group.rank,
            local_rank=self._settings.local_rank,
            generation=group.seat.generation,
            step=step,
            is_slow=pace.is_slow,
            ratio=round(pace.ratio, 2),
            seconds=pace.seconds,
            others=pace.others,
            looks=pace.looks,
            wall_time=self._clock.wall(),
        )
        log.warning(slow.headline())
        self._session.report_pace(slow)

    def _tell_step(self, group: Group, report: StepReport, speed: float) -> None:
        metrics = {**report.metrics, "images_per_s": speed}
        line = {
            "step": report.step,
            "epoch": report.epoch,
            "samples": self._samples,
            "attempt": self._settings.attempt,
            "generation": group.seat.generation,
            "world_size": group.world_size,
            "wall_time": self._clock.wall(),
            "checkpoint_s": self._held_up_s,
            "metrics": metrics,
        }
        self._held_up_s = 0.0
        self._metrics.append(line)
        if not self._times.is_reported:
            self._times.is_reported = True
            self._session.report_resumption(self._resumption(group, report.step))
        self._tell_progress(group, "train", metrics)

    def _resumption(self, group: Group, step: int) -> Resumption:
        times = self._times
        return Resumption(
            generation=group.seat.generation,
            last_step_at=times.last_step,
            noticed_at=times.noticed,
            assigned_at=times.assigned,
            formed_at=times.formed,
            synced_at=times.synced,
            first_step_at=self._clock.wall(),
            step_before=times.step_before,
            step_resumed=step,
            source=self._source.name.lower(),
        )

    def _tell_progress(
        self, group: Group, phase: str, metrics: Mapping[str, float], *, every_s: float = PROGRESS_S
    ) -> None:
        trainee, trouble = self._trainee, {"lines_not_written": float(self._metrics.failures)}
        if self._writer is not None:
            trouble["checkpoint_failures"] = float(self._writer.failures)
            trouble["checkpoints_skipped"] = float(self._writer.skipped)
        progress = Progress(
            generation=group.seat.generation,
            epoch=trainee.epoch,
            step=trainee.step,
            samples=self._samples,
            total_steps=trainee.total_steps,
            phase=phase,
            metrics={**metrics, **{name: count for name, count in trouble.items() if count}},
            trouble=self._writer.last_error if self._writer is not None else "",
            durable_step=self._writer.durable_step if self._writer is not None else -1,
            wall_time=self._clock.wall(),
        )
        self._session.report_progress(progress, every_s=every_s)

    def _evaluate(self, group: Group) -> None:
        if group.rank == 0:
            self._tell_progress(group, "evaluate", {}, every_s=0)
        figures = self._trainee.evaluate(group)
        if group.rank == 0:
            line = {
                "step": self._trainee.step,
                "epoch": self._trainee.epoch,
                "attempt": self._settings.attempt,
                "generation": group.seat.generation,
                "wall_time": self._clock.wall(),
                "evaluation": dict(figures),
            }
            self._metrics.append(line)
            self._tell_progress(group, "evaluate", figures, every_s=0)

    # ---- checkpoints -------------------------------------------------------------------------

    def _save_if_due(self, writer: CheckpointWriter) -> None:
        """Begin a checkpoint behind the training."""
        start = self._clock.monotonic()
        if not self._interval.is_due(step=self._trainee.step, now=start):
            return
        writer.begin(self._state(), self._manifest_now())
        self._interval.saved(start)
        self._interval.cost(stall_s=writer.stall_s, write_s=writer.write_s)
        self._held_up_s += self._clock.monotonic() - start

    def _save_durably(self) -> bool:
        """Write a checkpoint of the finished steps and wait for it; return whether it is there."""
        if self._writer is None or not self._may_write or not self._has_state:
            return False
        if self._saved_step != self._trainee.step and self._writer.save(
            self._state(), self._manifest_now(), timeout_s=_SAVE_S
        ):
            self._saved_step = self._trainee.step
        return self._saved_step == self._trainee.step

    def _manifest_now(self) -> Manifest:
        return replace(
            self._manifest,
            step=self._trainee.step,
            worlds=[list(world) for world in self._worlds],
            wall_time=self._clock.wall(),
        )

    # ---- the end of a generation -------------------------------------------------------------

    def _depart(self, group: Group) -> None:
        """Leave at a boundary that all ranks agreed on; rank 0 saves first if a stop asked for it."""
        agreed = group.agreed
        saved = self._save_durably() if agreed.stop and agreed.save else False
        saved = group.part(saved)
        if saved:
            self._saved_step = self._trainee.step
        self._times.noticed = self._clock.wall()
        log.info("generation left", generation=group.seat.generation, step=self._trainee.step, saved=saved)

    def _stop(self) -> TrainingEnd:
        """End on request; what no group could save is saved now by the worker that may."""
        stop = self._session.stop
        if stop is not None and stop.save:
            self._save_durably()
        if self._writer is not None:
            self._writer.wait(_SAVE_S)
        step = self._trainee.step
        self._session.report_stopped(step, saved=self._saved_step == step)
        return TrainingEnd.STOPPED

    def _finish(self, group: Group) -> None:
        """Hand over the model; every rank returns only when rank 0 has done so."""
        if group.rank == 0:
            self._save_durably()
            run_dir = self._settings.run_dir
            model = self._trainee.export(run_dir / "model") if run_dir is not None else ""
            figures = self._trainee.results()
            result = RunResult(
                epochs=self._trainee.epoch,
                steps=self._trainee.step,
                samples=self._samples,
                metrics=dict(figures),
                model=model,
            )
            self._tell_progress(group, "done", figures, every_s=0)
            self._session.report_finished(result)
        group.exchange([0])  # breaks if rank 0 was lost before: then another one hands over
        group.part()


def train(
    trainee: Trainee,
    session: Session,
    *,
    settings: LoopSettings,
    writer: CheckpointWriter | None,
    clock: Clock,
) -> TrainingEnd:
    """Train through generations until the job is complete or a stop was asked for.

    What the trainee raises, beside `GroupBroken`, is a real failure and passes through.
    """
    return ElasticLoop(trainee, session, settings=settings, writer=writer, clock=clock).run()
