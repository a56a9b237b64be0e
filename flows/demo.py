"""The demonstration: a node dies in mid-epoch, training goes on, a node joins, and nothing was lost.

The proof is not in the words: the sample audit says which ids were trained, and
the weights are compared with those of an undisturbed training of the same job.
"""

from __future__ import annotations

import time
from enum import Enum, auto
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import typer

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.ids import instance_of
from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.model.membership import Outcome
from elastic_core.model.progress import Progress
from flows.audience import RunEnd, RunSnapshot
from flows.live import LiveView, make_view
from flows.session import connect_prefect, run_flow, tell_end
from tasks import report as reports
from tasks.faults import kill_node
from tasks.reference import largest_difference, train_alone

EPOCHS: Final = 24
"""Long enough for a new node to start and join while the others train on, on a loaded machine as well."""
STRIKE_AFTER: Final = 0.2
"""Share of the training after which the node is killed."""


class Act(Enum):
    """Where the story is."""

    TOGETHER = auto()
    """All nodes train; the blow comes in the middle of an epoch."""
    STRUCK = auto()
    """A node is dead; the others have not gone on yet."""
    SMALLER = auto()
    """Training goes on with fewer nodes."""
    GROWN = auto()
    """A new node joined."""


class Story:
    """Watches a run through a view, and strikes once."""

    def __init__(self, view: LiveView, runs: Path, epochs: int) -> None:
        self.act = Act.TOGETHER
        self._view = view
        self._runs = runs
        self._epochs = epochs
        self._full = 0

    @property
    def end(self) -> RunEnd | None:
        """How the run ended."""
        return self._view.end

    def __enter__(self) -> Self:
        """Begin to show."""
        self._view.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop showing."""
        self._view.__exit__(kind, error, trace)

    def decided(self, sentence: str) -> None:
        """Pass on."""
        self._view.decided(sentence)

    def ended(self, end: RunEnd) -> None:
        """Pass on."""
        self._view.ended(end)

    def saw(self, snapshot: RunSnapshot) -> None:
        """Show, and let the story go on."""
        self._view.saw(snapshot)
        current, progress = snapshot.observation.current, snapshot.observation.progress
        if current is None or progress is None:
            return
        nodes = current.group_world_size
        match self.act:
            case Act.TOGETHER if nodes == snapshot.attempt.job.nodes.target and self._is_mid_epoch(progress):
                self._strike(snapshot)
            case Act.STRUCK if nodes < self._full and progress.generation == current.number:
                self.act = Act.SMALLER
                self.decided(f"training goes on with {nodes} of {self._full} nodes, at step {progress.step}")
            case Act.SMALLER if nodes == self._full and progress.generation == current.number:
                self.act = Act.GROWN
                self.decided(f"a new node joined: {nodes} nodes again, at step {progress.step}")

    def _is_mid_epoch(self, progress: Progress) -> bool:
        # Any step but an epoch's last: who waited for a narrower window than the flow's looks are
        # apart could miss it in every epoch.
        if not progress.total_steps or progress.step < STRIKE_AFTER * progress.total_steps:
            return False
        return progress.step % (progress.total_steps // self._epochs) != 0

    def _strike(self, snapshot: RunSnapshot) -> None:
        """Kill the node of rank 0: the hardest one to lose."""
        first = next(member for member in snapshot.observation.history[-1].members if member.group_rank == 0)
        victim = instance_of(first.node_id)
        progress = snapshot.observation.progress
        assert progress is not None
        kill_node(snapshot.attempt.job, self._runs, snapshot.attempt.directory.run, victim)
        self.act = Act.STRUCK
        self._full = snapshot.attempt.job.nodes.target
        self.decided(
            f"SIGKILL to every process of {victim}, the node of rank 0, "
            f"at step {progress.step} in epoch {progress.epoch + 1}"
        )


def demonstrate(job: JobSpec, *, runs: Path) -> int:
    """Run the demonstration and return its exit code: 0 only if everything was proved."""
    job = _prepared(job)
    url = connect_prefect()
    with Story(make_view(), runs, EPOCHS) as story:
        end = run_flow(job, story, runs=runs)
    if end.outcome is not Outcome.SUCCEEDED:
        tell_end(end, url)
        return end.exit_code
    typer.echo("training the same job undisturbed, for comparison")
    began = time.monotonic()
    model = train_alone(job, runs / end.run / "reference")
    typer.echo(f"undisturbed training took {time.monotonic() - began:.1f} s")
    proved = _prove(end, model, story.act)
    tell_end(end, url)
    return ExitCode.OK if proved else ExitCode.FAILED


def _prepared(job: JobSpec) -> JobSpec:
    """Return the job as the demonstration trains it: longer, reproducible to the bit, and anew."""
    training = job.training
    if not isinstance(training, ClassyTraining) or not isinstance(training.config, dict):
        raise RefusedInput(["training.kind: the demonstration needs 'classy'"])
    if job.pool.kind == "aws" or job.nodes.target < 2:
        raise RefusedInput(["nodes.target: the demonstration needs two nodes on this machine at least"])
    if job.nodes.min >= job.nodes.target:
        raise RefusedInput(["nodes.min: must be below nodes.target: training goes on with a node less"])
    training = training.model_copy(
        update={
            "config": {**training.config, "num_epochs": EPOCHS},
            "elastic": training.elastic.model_copy(update={"deterministic": True}),
        }
    )
    return job.model_copy(update={"name": f"{job.name[:50]}-demo", "resume": "never", "training": training})


def _prove(end: RunEnd, reference: Path, act: Act) -> bool:
    """Print what shows that nothing was lost; return whether all of it holds."""
    report = reports.read(end.report.parent)
    if report is None:
        raise ElasticError(f"{end.report} cannot be read")
    difference = largest_difference(end.report.parent / "model", reference)
    missed, repeated = report.samples_missed, report.samples_repeated
    claims = [
        ("a node was killed, training went on smaller, and grew again", act is Act.GROWN),
        (report.exactly_once, (missed, repeated) == (0, 0)),
        (
            f"{report.steps_lost} finished steps were lost (one is allowed for a crash)",
            report.steps_lost <= 1,
        ),
        (f"largest difference of any weight to the undisturbed training: {difference:g}", difference == 0.0),
    ]
    for claim, holds in claims:
        typer.echo(f"{'proved' if holds else 'NOT PROVED'}: {claim}")
    return all(holds for _, holds in claims)
