"""Runs on disk: one directory a run, one lock a job, and which run a job goes on with.

<runs>/<run>/job.json      the job as it was started
<runs>/<run>/attempt       how often it was launched; first part of the fence token
<runs>/<run>/driven        touched by the flow that drives it: when one did last
<runs>/<run>/costs.jsonl   what billed machines cost, a line a launch and a line an end
<runs>/<run>/report.json   how it ended; without it, or without success, the run is unfinished
<runs>/<run>/attempts/     reports and marks of the attempts before the newest
<runs>/.jobs/<job>.lock    held by the flow that drives the job, with the run's id in it

Files are replaced whole, so that a reader or a crash never sees half of one.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Final

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.events.costs import MachineCost, fold_costs
from elastic_core.events.lines import parse_lines
from elastic_core.events.record import RunMarks
from elastic_core.ids import RunId, check_name
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.model.membership import Outcome

RUNS: Final = Path("runs")
COSTS_FILE: Final = "costs.jsonl"
_STAMP_LENGTH = len("-20260131-235959-99")


class AlreadyRunning(RefusedInput):
    """Another flow drives this job now."""

    def __init__(self, job: str, run: str) -> None:
        self.run = run
        named = f" (run {run})" if run else ""
        super().__init__([f"job {job!r} is already running{named}: wait for it, or stop it first"])


class NoSuchRun(ElasticError):
    """There is no run of this name."""

    def __init__(self, run: str) -> None:
        super().__init__(f"no such run {run}" if run else "there are no runs yet")


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run."""

    path: Path

    @property
    def run(self) -> RunId:
        """The run's id: the directory's name."""
        return RunId(self.path.name)

    @property
    def job_file(self) -> Path:
        """The job, as JSON."""
        return self.path / "job.json"

    @property
    def report_file(self) -> Path:
        """The report, written when an attempt ended."""
        return self.path / "report.json"

    def job(self) -> JobSpec:
        """Return the job of this run."""
        return JobSpec.model_validate_json(self.job_file.read_bytes())

    def attempt(self) -> int:
        """Return the number of the newest attempt, 0 before the first."""
        try:
            return int((self.path / "attempt").read_text())
        except FileNotFoundError:
            return 0

    def begin_attempt(self, job: JobSpec, *, now: float) -> int:
        """Count a new attempt with this job, that began at wall-clock time `now`; return its number.

        The number is written first: an attempt that was never used costs nothing, one that is
        used twice would break the fencing of checkpoints.
        """
        number = self.attempt() + 1
        _write(self.path / "attempt", f"{number}\n")
        _write(self.job_file, job.model_dump_json(indent=2))
        self._keep_attempt(number - 1)
        _write(self.path / "marks.json", json.dumps({"started_at": now}))
        return number

    def _keep_attempt(self, number: int) -> None:
        """Keep what is known of an attempt when the next begins: its report, and when it began."""
        kept = self.path / "attempts"
        for file in (self.report_file, self.path / "marks.json"):
            if file.exists():
                kept.mkdir(exist_ok=True)
                file.replace(kept / f"{number:04d}-{file.name}")

    def attempt_files(self, number: int) -> tuple[Path, Path]:
        """Return where report and marks of an earlier attempt lie, if they do."""
        kept = self.path / "attempts"
        return kept / f"{number:04d}-report.json", kept / f"{number:04d}-marks.json"

    def note_driven(self) -> None:
        """Note that a flow drives the run now."""
        (self.path / "driven").touch()

    def driven_at(self) -> float:
        """Return when a flow drove the run last, in wall-clock seconds of this machine."""
        with suppress(FileNotFoundError):
            return (self.path / "driven").stat().st_mtime
        return self.job_file.stat().st_mtime

    def mark(self, name: str, *, now: float) -> None:
        """Note when something of this attempt happened for the first time: a field of `RunMarks`."""
        marks = self._marks()
        if name not in marks:
            _write(self.path / "marks.json", json.dumps({**marks, name: now}))

    def marks(self, *, ended_at: float) -> RunMarks:
        """Return what happened when in this attempt, whichever process noted it."""
        return RunMarks(**{"started_at": ended_at, **self._marks()}, ended_at=ended_at)

    def _marks(self) -> dict[str, float]:
        try:
            marks: dict[str, float] = json.loads((self.path / "marks.json").read_bytes())
        except FileNotFoundError:
            return {}
        return marks

    def outcome(self) -> Outcome | None:
        """Return how the newest attempt ended, or None if it did not end (or is running)."""
        try:
            return Outcome(json.loads(self.report_file.read_bytes())["state"])
        except (FileNotFoundError, KeyError, ValueError):
            return None

    def is_finished(self) -> bool:
        """Return whether the training is complete."""
        return self.outcome() is Outcome.SUCCEEDED


def all_runs(root: Path) -> list[RunDirectory]:
    """Return all runs, newest first."""
    paths = [path.parent for path in root.glob("*/job.json")]
    return [
        RunDirectory(path) for path in sorted(paths, key=lambda path: path.stat().st_ctime_ns, reverse=True)
    ]


def find_run(root: Path, run: str = "") -> RunDirectory:
    """Return the named run, or the one worked on last.

    Raises:
        NoSuchRun: There is none.
    """
    for directory in all_runs(root):
        if run in ("", directory.run):
            return directory
    raise NoSuchRun(run)


def unfinished_runs(root: Path, job: str) -> list[RunDirectory]:
    """Return the runs of a job that did not succeed, newest first."""
    return [
        directory
        for directory in all_runs(root)
        if directory.job().name == job and not directory.is_finished()
    ]


def choose_run(root: Path, job: JobSpec, *, run_id: str = "", now: datetime) -> RunDirectory:
    """Return the directory to train in: the named run's, an unfinished one's, or a new one.

    Raises:
        RefusedInput: `run_id` belongs to another training, or `resume` requires a run that is not there.
    """
    if run_id:
        return _named_run(root, job, run_id)
    if job.resume != "never":
        for directory in unfinished_runs(root, job.name):
            if not differences(directory.job(), job):
                return directory
    if job.resume == "require":
        raise RefusedInput([f"resume: is 'require', but no unfinished run of job {job.name!r} can go on"])
    return _create(root, job, _free_id(root, job.name, now))


def differences(before: JobSpec, after: JobSpec) -> list[str]:
    """Return what keeps `after` from going on with the state of `before`, as paths of the job file.

    Where and how wide a job trains may change between attempts; what it trains may not.
    """
    found = []
    if before.name != after.name:
        found.append("name")
    old, new = before.training.model_dump(), after.training.model_dump()
    found += [f"training.{key}" for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
    if isinstance(after.training, ClassyTraining) and after.training.elastic.global_batch == 0:
        # The global batch is then derived from the target's workers.
        if before.nodes.target != after.nodes.target:
            found.append("nodes.target")
        if before.workers_per_node != after.workers_per_node:
            found.append("workers_per_node")
    return found


@dataclass(frozen=True, slots=True)
class JobLock:
    """A held job."""

    file: IO[str]

    def name_run(self, run: RunId) -> None:
        """Tell whoever is refused which run holds the job."""
        self.file.truncate(0)
        self.file.write(run)
        self.file.flush()


@contextmanager
def job_lock(root: Path, job: str) -> Iterator[JobLock]:
    """Hold a job, one flow at a time.

    The kernel frees the lock with its holder, however that ends.

    Raises:
        AlreadyRunning: Another process holds it.
    """
    path = root / ".jobs" / f"{check_name('job', job)}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise AlreadyRunning(job, lock.read().strip()) from None
        lock.truncate(0)  # which run it will be is not known yet
        yield JobLock(lock)


def is_driven(root: Path, job: str) -> bool:
    """Return whether a flow drives this job now."""
    try:
        with job_lock(root, job):
            return False
    except AlreadyRunning:
        return True


def driven_run(root: Path, job: str) -> str | None:
    """Return the run of a job that a flow drives now, "" while it chooses one; None if no flow drives."""
    try:
        with job_lock(root, job):
            return None
    except AlreadyRunning as running:
        return running.run


def _named_run(root: Path, job: JobSpec, run_id: str) -> RunDirectory:
    try:
        check_name("run", run_id)
    except ValueError as error:
        raise RefusedInput([f"run_id: {error}"]) from error
    directory = RunDirectory(root / run_id)
    if not directory.job_file.exists():
        return _create(root, job, run_id)
    if different := differences(directory.job(), job):
        raise RefusedInput(
            [f"run_id: run {run_id} trains something else ({', '.join(different)} differ); name a new run"]
        )
    return directory


def _create(root: Path, job: JobSpec, run_id: str) -> RunDirectory:
    directory = RunDirectory(root / run_id)
    directory.path.mkdir(parents=True, exist_ok=True)
    _write(directory.job_file, job.model_dump_json(indent=2))
    return directory


def _free_id(root: Path, job: str, now: datetime) -> str:
    stem = f"{job[: 63 - _STAMP_LENGTH]}-{now:%Y%m%d-%H%M%S}"
    taken = {path.name for path in root.glob(f"{stem}*")}
    return next(name for name in (stem, *(f"{stem}-{n}" for n in range(2, 100))) if name not in taken)


def _write(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.draft")
    draft.write_text(text)
    draft.replace(path)


def read_costs(directory: Path) -> tuple[MachineCost, ...]:
    """Return the machines that a run's directory tells of."""
    try:
        return fold_costs(parse_lines((directory / COSTS_FILE).read_text().splitlines()))
    except FileNotFoundError:
        return ()
