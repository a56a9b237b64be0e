"""Looks at the workers' pulses, once a second or more often, on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from elastic_core.agent.events import WorkerHung
from elastic_core.agent.hang import Hang, HangDetector
from elastic_core.agent.stacks import dump_stacks, is_stopped, place_of
from elastic_core.clock import Clock
from elastic_core.model.failure import bound
from elastic_core.pulse import Beat, read_beat

_PERIOD_S: Final = 1.0


def pulse_file(directory: Path, local_rank: int) -> Path:
    """Return where a worker's pulse beats."""
    return directory / f"worker-{local_rank}.pulse"


def stack_file(directory: Path, local_rank: int) -> Path:
    """Return where a worker writes its stacks when it is asked."""
    return directory / f"worker-{local_rank}.stacks"


class PulseWatch:
    """Watches all workers of one node."""

    def __init__(
        self,
        directory: Path,
        *,
        processes: Callable[[], Mapping[int, int]],
        tell: Callable[[WorkerHung], None],
        declared: float,
        clock: Clock,
    ) -> None:
        """Begin.

        Args:
            directory: Where the pulses are.
            processes: Returns the process id of each local rank's worker.
            tell: Is called from the thread and must only enqueue.
            declared: Limit in seconds, 0 to derive it from the steps so far.
            clock: Of the process.
        """
        self._directory = directory
        self._processes = processes
        self._tell = tell
        self._declared = declared
        self._clock = clock
        self._period = min(_PERIOD_S, declared / 4) if declared else _PERIOD_S
        self._detectors: dict[int, HangDetector] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        self._thread.join(timeout=5.0)

    def _run(self) -> None:
        while not self._closing.wait(self._period):
            for local_rank, pid in self._processes().items():
                self._look(local_rank, pid)

    def _look(self, local_rank: int, pid: int) -> None:
        beat = read_beat(pulse_file(self._directory, local_rank))
        if beat.pid != pid:  # none yet, or that of the worker before
            beat = Beat(pid=pid)
        detector = self._detectors.get(local_rank)
        if detector is None:
            detector = self._detectors[local_rank] = HangDetector(
                declared=self._declared, period=self._period
            )
        hang = detector.look(beat, is_stopped=is_stopped(pid), now=self._clock.monotonic())
        if hang is not None:
            self._tell(self._describe(local_rank, pid, hang, beat))

    def _describe(self, local_rank: int, pid: int, hang: Hang, beat: Beat) -> WorkerHung:
        stacks = dump_stacks(pid, stack_file(self._directory, local_rank))
        return WorkerHung(
            local_rank=local_rank,
            pid=pid,
            seconds=hang.seconds,
            step=hang.step if beat.since else -1,
            is_stopped=hang.is_stopped,
            place=place_of(stacks),
            stacks=bound(stacks),
        )
