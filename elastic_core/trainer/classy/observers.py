"""What looks at the steps of rank 0 and changes nothing: curves for TensorBoard, a profile of a few steps."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Protocol

import structlog
import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy import hooks
from elastic_core.trainer.trainee import StepReport

CURVES: Final = "tensorboard"
PROFILES: Final = "profile"

_FLUSH_S: Final = 10

log = structlog.get_logger(__name__)


class Observer(Protocol):
    """Is told of each step by the process that is rank 0 in it."""

    def before_step(self, step: int) -> None:
        """Note that a step begins."""
        ...

    def after_step(self, report: StepReport) -> None:
        """Note what a finished step gave."""
        ...

    def after_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Note what an evaluation gave."""
        ...


def build_observers(config: Mapping[str, Any], run_dir: Path | None) -> tuple[Observer, ...]:
    """Return the observers that a config's hooks ask for; without a run's directory there are none.

    Raises:
        RefusedInput: TensorBoard is asked for and not installed.
    """
    found: list[Observer] = []
    if run_dir is None:
        return ()
    if (curves := hooks.settings_of(config, hooks.TENSORBOARD)) is not None:
        found.append(Curves(run_dir / CURVES, period=curves.get("log_period", 1)))
    if (profile := hooks.settings_of(config, hooks.PROFILER)) is not None:
        first, steps = profile.get("first_step", 10), profile.get("steps", 3)
        found.append(Profile(run_dir / PROFILES, first=first, steps=steps))
    return tuple(found)


class Curves:
    """Writes a run's curves into one directory, whichever process is rank 0, however often it starts.

    A writer that takes up at step s first declares what others wrote from s on to be void, so a
    step that was done again is shown once.
    """

    def __init__(self, directory: Path, *, period: int) -> None:
        self._directory = directory
        self._period = period
        self._writer: Any = None
        self._next = -1
        try:
            # imported now, not at a survivor's first step as rank 0
            self._make = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise RefusedInput(
                ["hooks: tensorboard_plot needs TensorBoard where this runs: pip install tensorboard"]
            ) from error

    def before_step(self, step: int) -> None:
        """Open a writer if the last step was not this one's."""
        if step != self._next:
            if self._writer is not None:
                self._writer.close()
            self._writer = self._make(str(self._directory), purge_step=step, flush_secs=_FLUSH_S)

    def after_step(self, report: StepReport) -> None:
        """Write the figures of a step."""
        self._next = report.step + 1
        if report.step % self._period == 0:
            self._write(report.step, "train", report.metrics)

    def after_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Write the figures of an evaluation at the last step before it, and bring all to the disk."""
        if self._writer is None:
            self.before_step(step)
        self._write(step - 1, "test", {name.removeprefix("test_"): value for name, value in figures.items()})
        self._writer.flush()

    def _write(self, step: int, phase: str, figures: Mapping[str, float]) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(f"{phase}/{name}", value, step)


class Profile:
    """Records a few steps with torch's profiler and writes a trace for chrome://tracing or Perfetto."""

    def __init__(self, directory: Path, *, first: int, steps: int) -> None:
        self._directory = directory
        self._first, self._last = first, first + steps - 1
        self._profiler: Any = None

    def before_step(self, step: int) -> None:
        """Begin at the first of the steps."""
        if step == self._first and self._profiler is None:
            self._profiler = torch.profiler.profile()
            self._profiler.start()

    def after_step(self, report: StepReport) -> None:
        """End after the last of the steps."""
        if report.step < self._last or self._profiler is None:
            return
        self._profiler.stop()
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / f"steps-{self._first}-{self._last}.json"
        self._profiler.export_chrome_trace(str(path))
        self._profiler = None
        log.info("profile written", path=str(path))

    def after_evaluation(self, step: int, figures: Mapping[str, float]) -> None:
        """Evaluations are not recorded."""
