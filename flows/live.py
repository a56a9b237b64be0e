"""Live progress in a terminal: a panel that redraws itself, or plain lines where there is no terminal."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Protocol, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_core.cluster.provider import InstanceState
from elastic_core.events.ledger import fold_ledger
from elastic_core.events.metrics import MetricLine
from elastic_core.events.record import RunRecord
from elastic_core.exits import ExitCode
from elastic_core.ids import instance_of
from elastic_core.model.membership import Closed, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.model.progress import Progress
from flows.audience import RunEnd, RunSnapshot
from tasks.watch import Observation

PLAIN_PERIOD_S: Final = 1.0
_FORMS: Final = {"loss": ".4f", "accuracy": ".1%", "images_per_s": ".0f"}


class LiveView(Protocol):
    """An audience that shows; a context manager."""

    @property
    def end(self) -> RunEnd | None:
        """How the run ended, once it did."""
        ...

    def __enter__(self) -> Self:
        """Begin to show."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the last state and leave the terminal as it was."""
        ...

    def decided(self, sentence: str) -> None:
        """Show a decision."""
        ...

    def saw(self, snapshot: RunSnapshot) -> None:
        """Show the run."""
        ...

    def ended(self, end: RunEnd) -> None:
        """Keep how it ended."""
        ...


def make_view() -> LiveView:
    """Return what fits where our output goes."""
    console = Console()
    return TerminalView(console) if console.is_terminal else PlainView()


class PlainView:
    """One line a decision, and one a second for the progress, if it moved."""

    def __init__(self) -> None:
        self.end: RunEnd | None = None
        self._console = Console(highlight=False, soft_wrap=True)
        self._began = time.monotonic()
        self._told_at = float("-inf")
        self._told = ""

    def __enter__(self) -> Self:
        """Begin."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""

    def decided(self, sentence: str) -> None:
        """Print a decision."""
        self._print(sentence)

    def saw(self, snapshot: RunSnapshot) -> None:
        """Print where training is, at most once a second, and only news."""
        now = time.monotonic()
        line = progress_line(snapshot)
        if line and line != self._told and now - self._told_at >= PLAIN_PERIOD_S:
            self._told, self._told_at = line, now
            self._print(line)

    def ended(self, end: RunEnd) -> None:
        """Keep how it ended."""
        self.end = end

    def _print(self, line: str) -> None:
        self._console.print(f"{time.monotonic() - self._began:6.1f} s  {line}", markup=False)


class TerminalView:
    """A panel at the bottom of the terminal, decisions scrolling above it."""

    def __init__(self, console: Console) -> None:
        self.end: RunEnd | None = None
        self._console = console
        self._began = time.monotonic()
        self._live = Live(console=console, refresh_per_second=4, transient=False)

    def __enter__(self) -> Self:
        """Begin to redraw."""
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw once more and give the terminal back."""
        self._live.__exit__(kind, error, trace)

    def decided(self, sentence: str) -> None:
        """Print a decision above the panel."""
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self._console.print(Text(stamp, style="dim") + Text(sentence))

    def saw(self, snapshot: RunSnapshot) -> None:
        """Redraw the panel."""
        self._live.update(_panel(snapshot))

    def ended(self, end: RunEnd) -> None:
        """Keep how it ended."""
        self.end = end


def progress_line(snapshot: RunSnapshot) -> str:
    """Return where a run is, on one line; "" before the first step."""
    progress = snapshot.observation.progress
    if progress is None:
        return ""
    told = "  ".join(f"{name} {value}" for name, value in figures(progress))
    return f"{told}  nodes {_nodes(snapshot)}"


def _panel(snapshot: RunSnapshot) -> Group:
    table = Table.grid(padding=(0, 2))
    for _ in range(2):
        table.add_column()
    table.add_row("run", str(snapshot.attempt.directory.run))
    table.add_row("nodes", _nodes(snapshot))
    progress = snapshot.observation.progress
    if progress is None:
        return Group(table, Text("waiting for the first step", style="dim"))
    for name, value in figures(progress):
        table.add_row(name, value)
    spent = spent_so_far(snapshot, time.time())
    table.add_row("time", ", ".join(f"{name.replace('_', ' ')} {took:.1f} s" for name, took in spent.items()))
    return Group(table, ProgressBar(total=max(progress.total_steps, 1), completed=progress.step, width=60))


def figures(progress: Progress) -> list[tuple[str, str]]:
    """Return what a progress says, as names and values for people."""
    steps = f"{progress.step}/{progress.total_steps}" if progress.total_steps else str(progress.step)
    # An epoch is over when it is evaluated, and none follows the last one.
    is_within = progress.phase not in ("evaluate", "done") and progress.step != progress.total_steps
    epoch = progress.epoch + is_within
    shown = [("epoch", str(epoch)), ("step", steps)]
    if progress.phase != "train":
        shown.append(("phase", progress.phase))
    for name, form in _FORMS.items():
        if name in progress.metrics:
            shown.append((name.replace("_per_s", "/s"), format(progress.metrics[name], form)))
    if progress.trouble:
        shown.append(("checkpoint", f"not written: {progress.trouble}"))
    return shown


def spent_so_far(snapshot: RunSnapshot, now: float) -> dict[str, float]:
    """Return the ledger of an attempt that goes on, from what the store knows alone."""
    attempt, seen = snapshot.attempt, snapshot.observation
    last = seen.progress
    steps = MetricLine(
        phase="train",
        attempt=attempt.number,
        generation=last.generation if last else 0,
        step=last.step if last else 0,
        epoch=last.epoch if last else 0,
        wall_time=now,
    )
    record = RunRecord(
        run=attempt.directory.run,
        attempt=attempt.number,
        job=attempt.job,
        closed=Closed(outcome=Outcome.PREEMPTED, exit_code=ExitCode.PREEMPTED, reason="going on"),
        marks=attempt.directory.marks(ended_at=now),
        history=seen.history,
        resumptions=seen.resumptions,
        lines=(steps,) if last else (),
    )
    return {spent: seconds for spent, seconds in fold_ledger(record).seconds().items() if seconds >= 0.05}


def _nodes(snapshot: RunSnapshot) -> str:
    """Return how many nodes train, of how many that live, and what the others do."""
    seen = snapshot.observation
    training = seen.current.group_world_size if seen.current else 0
    if seen.progress is not None and seen.progress.phase == "done":
        return f"{training} done"
    if seen.closed is not None:
        return f"{training} ended"
    warming = sum(node.phase is NodePhase.WARMING for node in seen.nodes)
    counts = ((warming, "warming"), (_starting(seen), "starting"))
    others = [f"{count} {word}" for count, word in counts if count > 0]
    return f"{training} training" + (f" ({', '.join(others)})" if others else "")


def _starting(seen: Observation) -> int:
    """Return how many nodes run and never came to the rendezvous; one that left it is ending."""
    came = {instance_of(record.node_id) for record in seen.nodes}
    came |= {instance_of(member.node_id) for entry in seen.history for member in entry.members}
    running = (instance for instance in seen.instances if instance.state is InstanceState.RUNNING)
    return sum(instance.name not in came for instance in running)
