"""The state of a script's training: kept in memory step by step, on disk now and then, restored at the start.

All ranks of a data-parallel training hold the same state, so any snapshot of the
newest step will do: the ranks compare what their memories hold, rank 0 looks for a newer
checkpoint, and whoever has the newest state gives it to the others.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Final, NoReturn

import structlog

from elastic_core.clock import SystemClock
from elastic_core.errors import RefusedInput
from elastic_core.model.progress import Progress, Resumption, RunResult
from elastic_core.trainer.checkpoint import Manifest, Token
from elastic_core.trainer.checkpoint_url import open_checkpoints
from elastic_core.trainer.checkpoint_writer import CheckpointWriter
from elastic_core.trainer.classy.seeds import derive, seed_all
from elastic_core.trainer.group import Group
from elastic_core.trainer.interval import CheckpointInterval
from elastic_core.trainer.script.memory import Mark, MemorySnapshots, Pace
from elastic_core.trainer.script.parts import Boundary, Stateful, load_parts, unwrapped
from elastic_core.trainer.script.sampler import ElasticSampler
from elastic_core.trainer.script.story import Story
from elastic_core.trainer.script.surroundings import Surroundings

_SAVE_S: Final = 120.0
"""Seconds for the checkpoint at the end; the agent's grace may be shorter."""

_NOTHING: Final = Mark(step=-1, attempt=0, generation=0, wall_time=0.0)

log = structlog.get_logger(__name__)


class Snapshot:
    """State and place of a script's training; a `sampler.Cursor`.

    Attributes:
        values: Plain values of the script's own (best accuracy so far…), kept with the state.
        step: Finished steps.
    """

    current: ClassVar[Snapshot | None] = None
    """The one that the functions of `trainer.elastic` act on: a script has one training."""

    def __init__(
        self, *, directory: str | Path | None = None, seed: int = 0, every: int = 0, **parts: Stateful
    ) -> None:
        """Restore the newest state there is into the parts, or begin at step 0.

        With several workers the process group must have been formed.

        Args:
            directory: Where records and checkpoints go if no agent says so; None: nowhere.
            seed: Of the order of the samples, and of what model and augmentation draw.
            every: Steps from one snapshot in memory to the next; 0: so that copying takes at most a
                twentieth of the time.
            parts: Model, optimizer, schedule… by a name of your choice.

        Raises:
            RefusedInput: The saved state is of another training, or the directory is not shared.
        """
        self.values: dict[str, Any] = {}
        self.step = 0
        self.seed = seed
        self._parts = {name: unwrapped(part) for name, part in parts.items()}
        self._boundary = Boundary(self._parts.values())
        self._clock = SystemClock()
        self._process = os.getpid()
        self._began_at = self._clock.wall()
        self._place = Surroundings.of(os.environ, Path(directory) if directory else None)
        self._group = Group.of_program(self._place.generation, world_size=self._place.world_size)
        self._memory = self._open_memory()
        self._pace = Pace(every)
        self._samples = 0
        self._total = 0
        self._figures: dict[str, float] = {}
        self._held_up_s = 0.0
        self._asked_to_leave = False
        self._sampler: ElasticSampler | None = None
        self._order: dict[str, Any] = {}
        self._mark = _NOTHING
        self._writer = self._open_writer()
        self._attempt = self._agree_on_attempt()
        self._story = Story(self._place, attempt=self._attempt, environment=os.environ, clock=self._clock)
        self._source = self._restore()
        self._resumption: Resumption | None = self._resumed()
        self._last_step_at = self._clock.wall()
        self._stepped_at = self._clock.monotonic()
        self._interval = CheckpointInterval(
            self._place.checkpoint, now=self._stepped_at, failures=int(self._source != "fresh")
        )
        self._begin()

    # ---- what the sampler asks ---------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's rank."""
        return self._group.rank

    @property
    def world_size(self) -> int:
        """Workers in this generation."""
        return self._group.world_size

    def begin_step(self, step: int, epoch: int, ids: Sequence[int]) -> None:
        """Hear that this worker was given the samples of a step."""
        self._story.begin_step(step=step, epoch=epoch, ids=ids)

    def expect(self, total: int) -> None:
        """Hear how many steps the whole training has."""
        self._total = total
        if self.step >= total:
            log.info("already complete, nothing to train", step=self.step)
            self.finish()

    def order_samples(self, samples: int, *, global_batch: int, shuffle: bool) -> ElasticSampler:
        """Return the sampler of this training.

        Raises:
            RefusedInput: The saved state was trained with another order.
        """
        order = {"samples": samples, "global_batch": global_batch, "seed": self.seed, "shuffle": shuffle}
        for name, new in order.items():
            old = self._order.get(name, new)
            if old != new:
                raise RefusedInput(
                    [
                        f"{name}: {old} in the saved state → {new} now, but it decides which samples come "
                        "next: put it back, or begin anew in another directory"
                    ]
                )
        self._order = order
        self._sampler = ElasticSampler(
            self, samples, global_batch=global_batch, seed=self.seed, shuffle=shuffle
        )
        return self._sampler

    # ---- steps -------------------------------------------------------------------------------

    def finish_step(self, figures: Mapping[str, float]) -> None:
        """Take note of a finished optimizer step, and keep the state if that is due."""
        step, now = self.step, self._clock.monotonic()
        self._pace.stepped(now - self._stepped_at)
        self.step += 1
        self._boundary.is_here = True
        self._samples += self._sampler.size_of(step) if self._sampler is not None else 0
        self._last_step_at = self._clock.wall()
        self._figures = dict(figures)
        self._story.end_step(
            self._progress("train"), step=step, epoch=self._epoch_of(step), held_up_s=self._held_up_s
        )
        if self._resumption is not None:
            self._story.resumed(replace(self._resumption, first_step_at=self._last_step_at))
            self._resumption = None
        self._keep_what_is_due()
        seed_all(derive(self.seed, "step", self.step, self.rank))
        if self.step == self._total:
            self.finish()
        if self._asked_to_leave:
            self._leave()
        self._stepped_at = self._clock.monotonic()

    def weight(self) -> float:
        """Return the next step's weight; see `ElasticSampler.weight`."""
        return self._sampler.weight() if self._sampler is not None else 1.0

    def finish(self, *, model: str = "", figures: Mapping[str, float] | None = None) -> None:
        """Say that the training is complete, and with which figures."""
        self._figures = {**self._figures, **(figures or {})}
        epochs = self._epoch_of(self.step)
        result = RunResult(
            epochs=epochs, steps=self.step, samples=self._samples, metrics=self._figures, model=model
        )
        self._story.finished(self._progress("done"), result)

    def _progress(self, phase: str) -> Progress:
        trouble = {}
        if self._writer is not None and self._writer.failures:
            trouble["checkpoint_failures"] = float(self._writer.failures)
        return Progress(
            generation=self._place.generation,
            epoch=self._epoch_of(self.step),
            step=self.step,
            samples=self._samples,
            total_steps=self._total,
            phase=phase,
            metrics={**self._figures, **trouble},
            trouble=self._writer.last_error if self._writer is not None else "",
            durable_step=self._writer.durable_step if self._writer is not None else -1,
            wall_time=self._last_step_at,
        )

    def _epoch_of(self, step: int) -> int:
        return self._sampler.epoch_of(step) if self._sampler is not None else 0

    # ---- keeping -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the whole state, without copies."""
        return {
            "parts": {name: part.state_dict() for name, part in self._parts.items()},
            "values": self.values,
            "cursor": {"step": self.step, "samples": self._samples},
            "order": self._order,
        }

    def _keep_what_is_due(self) -> None:
        start = self._clock.monotonic()
        if self.step - self._mark.step >= self._pace.every or self._asked_to_leave:
            self._keep_in_memory()
            self._pace.copied(self._clock.monotonic() - start)
        if self._writer is not None and self.step == self._total:
            self._writer.save(self.state(), self._manifest(), timeout_s=_SAVE_S)
        elif self._writer is not None and self._is_checkpoint_due():
            self._writer.begin(self.state(), self._manifest())
            self._interval.saved(self._clock.monotonic())
            self._interval.cost(stall_s=self._writer.stall_s, write_s=self._writer.write_s)
        self._held_up_s = self._clock.monotonic() - start

    def _keep_in_memory(self) -> None:
        mark = Mark(
            step=self.step,
            attempt=self._attempt,
            generation=self._place.generation,
            wall_time=self._last_step_at,
        )
        try:
            self._memory.keep(self.state(), mark)
        except OSError as error:
            log.warning("no snapshot in memory", step=self.step, why=error.strerror)
        else:
            self._mark = mark

    def _is_checkpoint_due(self) -> bool:
        if self._sampler is not None and self.step % self._sampler.steps_per_epoch == 0:
            return True
        return self._interval.is_due(step=self.step, now=self._clock.monotonic())

    def _manifest(self, step: int | None = None) -> Manifest:
        return Manifest(
            step=self.step if step is None else step,
            attempt=self._attempt,
            generation=self._place.generation,
            wall_time=self._clock.wall(),
        )

    # ---- the beginning -----------------------------------------------------------------------

    def _open_memory(self) -> MemorySnapshots:
        """Return the agent's memory, or some of this process's own, for a last word when it is stopped."""
        if self._place.memory:
            return MemorySnapshots.from_text(self._place.memory)
        is_useful = self.rank == 0 and self._place.checkpoints is not None
        return MemorySnapshots.new() if is_useful else MemorySnapshots(())

    def _open_writer(self) -> CheckpointWriter | None:
        path = self._place.checkpoints
        return None if path is None or self.rank != 0 else self._open_writer_at(path)

    def _open_writer_at(self, path: str) -> CheckpointWriter:
        return CheckpointWriter(open_checkpoints(path, keep=self._place.checkpoint.keep), clock=self._clock)

    def _agree_on_attempt(self) -> int:
        """Return the launch's number; where nobody counts launches the checkpoints do."""
        own = self._place.attempt
        if not own and self._writer is not None:
            own = self._writer.directory.newest_attempt() + 1
        ((attempt,), *_) = self._group.exchange([own])
        token, has_claimed = Token(attempt, self._place.generation), False
        if self._writer is not None:
            has_claimed = self._writer.claim(token, f"{self._place.node_id}-{self._place.local_rank}")
        ((is_claimed,), *_) = self._group.exchange([int(has_claimed)])
        if is_claimed and self._place.checkpoints is not None and self.rank:
            self._open_writer_at(self._place.checkpoints).check_shared(token)
        return attempt

    def _restore(self) -> str:
        """Bring the newest state to all ranks; return where it came from."""
        kept = self._memory.newest()
        own = kept[0] if kept is not None else _NOTHING
        marks = self._group.exchange([own.step, own.attempt, own.generation])
        highest = max(marks)
        checkpoint = self._newest_checkpoint(above=highest[0])
        ((found,), *_) = self._group.exchange([int(checkpoint is not None)])
        self._step_before = highest[0] - 1
        self._before_at = own.wall_time
        if found:
            state = self._group.broadcast_state(checkpoint, source=0)
        elif highest[0] < 0:
            return "fresh"
        elif all(mark == highest for mark in marks):
            state = kept[1] if kept is not None else None
        else:
            given = kept[1] if kept is not None else None
            state = self._group.broadcast_state(given, source=marks.index(highest))
        self._load(state)
        return "checkpoint" if found else "memory"

    def _newest_checkpoint(self, above: int) -> Mapping[str, Any] | None:
        if self._writer is None:
            return None
        directory, resume = self._writer.directory, self._place.resume
        attempt = self._attempt if resume == "never" else 0
        checkpoint = directory.newest(above=above, attempt=attempt)
        if checkpoint is None and above < 0 and resume == "require":
            directory.require()
        return checkpoint.state if checkpoint is not None else None

    def _load(self, state: Mapping[str, Any]) -> None:
        if not isinstance(state, Mapping) or "parts" not in state:
            raise RefusedInput(
                ["checkpoint.directory: its checkpoints were not written by elastic.Snapshot(); name another"]
            )
        load_parts(self._parts, state["parts"])
        self.values = dict(state["values"])
        self.step, self._samples = state["cursor"]["step"], state["cursor"]["samples"]
        self._order = dict(state["order"])

    def _resumed(self) -> Resumption:
        now = self._clock.wall()
        return Resumption(
            generation=self._place.generation,
            last_step_at=max(self._before_at, 0.0),
            noticed_at=0.0,
            assigned_at=self._began_at,
            formed_at=self._began_at,
            synced_at=now,
            first_step_at=now,
            step_before=self._step_before,
            step_resumed=self.step,
            source=self._source,
        )

    def _begin(self) -> None:
        Snapshot.current = self
        self._story.begin(step=self.step, source=self._source)
        seed_all(derive(self.seed, "step", self.step, self.rank))
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._hear_of_the_end)
        if self.rank == 0:
            log.info("going on", step=self.step, source=self._source, world_size=self.world_size)

    # ---- the end -----------------------------------------------------------------------------

    def _hear_of_the_end(self, *_: object) -> None:
        """Leave after this step; what fails until then fails because others leave, too."""
        if os.getpid() != self._process:
            _end_by_sigterm()  # a process that the script forked
        self._asked_to_leave = True
        sys.excepthook = self._leave_by_exception

    def _leave(self) -> NoReturn:
        if self._writer is not None:
            self._writer.save(self.state(), self._manifest(), timeout_s=_SAVE_S)
        _end_by_sigterm()

    def _leave_by_exception(
        self, kind: type[BaseException], error: BaseException, _: TracebackType | None
    ) -> None:
        """Save the parts as they are between two steps, else what was kept last.

        A peer that left at its boundary breaks the others' collective, and a signal to a whole process
        group ends data loaders, which the main process then complains of.
        """
        log.info("leaving", step=self.step, why=f"{kind.__name__}: {error}")
        if self._boundary.is_here:
            self._leave()
        kept = self._memory.newest() if self._writer is not None else None
        if self._writer is not None and kept is not None:
            mark, state = kept
            self._writer.save(state, self._manifest(mark.step), timeout_s=_SAVE_S)
        _end_by_sigterm()


def _end_by_sigterm() -> NoReturn:
    """End as a program does that has no handler, so that the launcher sees what it expects."""
    sys.stdout.flush()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(128 + signal.SIGTERM)
