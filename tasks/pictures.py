"""Pictures of a run that is over: what it learned, who took part, and where the time went.

Small PNG files (far below 200 KB), in colours that people who see few colours can
tell apart (Okabe and Ito), each with the fact it shows as its title.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from elastic_core.events.ledger import Spent
from elastic_core.events.metrics import MetricLine, surviving
from elastic_core.events.report import GenerationRow, RunReport
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.membership import Cause
from elastic_core.quality.score import Score

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE: Final = "#0072B2"
SKY: Final = "#56B4E9"
ORANGE: Final = "#E69F00"
VERMILION: Final = "#D55E00"
GREEN: Final = "#009E73"
PURPLE: Final = "#CC79A7"
GREY: Final = "#8C8C8C"

_DPI: Final = 110
_POINTS: Final = 2000
"""A curve has no more points than so many, whatever the training's length."""
_MAX_NODES: Final = 40
"""More nodes than so many are counted, not drawn."""
_LABELS: Final = 14
"""More generations than so many are drawn without their numbers."""

log = structlog.get_logger(__name__)


def draw_all(report: RunReport, lines: Sequence[MetricLine], directory: Path) -> tuple[str, ...]:
    """Draw what there is to be drawn into a directory and return the names of the files.

    A picture is a courtesy: one that cannot be drawn is warned of and left out.
    """
    drawings: dict[str, Callable[[Path], bool]] = {
        "curve.png": lambda path: draw_curve(lines, path),
        "timeline.png": lambda path: draw_timeline(
            report.generations, path, begin=report.started_at, end=report.started_at + report.wall_s
        ),
        "ledger.png": lambda path: draw_ledger(
            report.ledger, path, cost_s=sum(row.cost_s for row in report.generations)
        ),
    }
    drawn = []
    for name, draw in drawings.items():
        try:
            if draw(directory / name):
                drawn.append(name)
        except (OSError, ValueError, ImportError) as error:
            log.warning("picture not drawn", picture=name, why=str(error))
    return tuple(drawn)


def as_data_uri(path: Path) -> str:
    """Return a picture as an address that holds all of it, for Markdown."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


# ---- what it learned -------------------------------------------------------------------------


def draw_curve(lines: Iterable[MetricLine], path: Path) -> bool:
    """Draw loss and accuracy over the steps, with the changes of the workers; False without a step."""
    kept = surviving(lines)
    train = [line for line in kept if line.phase == "train" and "loss" in line.figures]
    tested = [line for line in kept if "test_accuracy" in line.figures]
    if not train:
        return False
    figure = _figure(9, 4.4)
    loss = figure.subplots()
    every = -(-len(train) // _POINTS)
    shown = train[::every]
    loss.plot(
        [line.step + 1 for line in shown],
        [line.figures["loss"] for line in shown],
        color=BLUE, linewidth=1.0, label="training loss",
    )  # fmt: skip
    loss.set_xlabel("optimizer step")
    loss.set_ylabel("training loss", color=BLUE)
    loss.set_ylim(bottom=0)
    loss.set_xlim(0, max(line.step for line in train) + 1)
    if tested:
        _draw_accuracy(loss, tested)
    changes = _draw_changes(loss, train)
    _title(loss, _curve_fact(train, tested, changes), pad=20)
    return _save(figure, path)


def _draw_accuracy(loss: Axes, tested: Sequence[MetricLine]) -> None:
    accuracy: Any = loss.twinx()
    steps = [line.step for line in tested]
    values = [100 * line.figures["test_accuracy"] for line in tested]
    accuracy.plot(steps, values, color=VERMILION, marker="o", markersize=4, linewidth=1.2, clip_on=False)
    accuracy.set_ylabel("test accuracy in %", color=VERMILION)
    accuracy.set_ylim(0, 102)
    accuracy.spines["top"].set_visible(False)


def _draw_changes(loss: Axes, train: Sequence[MetricLine]) -> int:
    """Mark where another group of workers went on, with its size; return how many changes there were."""
    changes = [
        after
        for before, after in pairwise(train)
        if (before.attempt, before.generation) != (after.attempt, after.generation)
    ]
    for line in changes:
        loss.axvline(line.step, color=GREY, linestyle="--", linewidth=0.9, zorder=0)
    if 0 < len(changes) <= _LABELS:
        above: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        room, free_from = 0.04 * (train[-1].step + 1), -1.0
        for line in [train[0], *changes]:
            if line.step >= free_from:  # the sizes of short generations would overlap
                place: dict[str, Any] = {"xy": (line.step, 1.0), "xytext": (0, 3), "ha": "center"}
                loss.annotate(f"{line.world_size} w", fontsize=8, color="#555555", **place, **above)
                free_from = line.step + room
    return len(changes)


def _curve_fact(train: Sequence[MetricLine], tested: Sequence[MetricLine], changes: int) -> str:
    if tested:
        reached = f"{100 * tested[-1].figures['test_accuracy']:.1f} % of the test samples are right"
    else:
        reached = f"the loss fell from {train[0].figures['loss']:.3g} to {train[-1].figures['loss']:.3g}"
    after = f"after {train[-1].step + 1} steps"
    through = "with the same workers throughout" if not changes else _changes_of(changes)
    return f"{reached} {after}, {through}"


def _changes_of(changes: int) -> str:
    return f"through {changes} change{'s' * (changes > 1)} of the workers (w)"


# ---- who took part ---------------------------------------------------------------------------


def draw_timeline(generations: Sequence[GenerationRow], path: Path, *, begin: float, end: float) -> bool:
    """Draw which node trained when, and how many workers there were; False without generations."""
    if not generations:
        return False
    everyone = _nodes(generations)
    nodes = everyone[:_MAX_NODES]
    rows_inch = max(1.0, 0.36 * len(nodes))
    figure = _figure(9, 2.2 + rows_inch)
    gantt, strip = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [rows_inch, 0.7]})
    ends = [row.published_at for row in generations[1:]] + [end]
    for row, until in zip(generations, ends, strict=True):
        _draw_generation(gantt, row, (row.published_at - begin, until - begin), nodes)
    for before, row in pairwise(generations):
        _draw_faults(gantt, before, row, row.published_at - begin, nodes)
    if len(generations) <= _LABELS:
        _label_generations(gantt, generations, ends, begin)
    gantt.set_yticks(range(len(nodes)), nodes)
    if len(everyone) > len(nodes):
        gantt.set_xlabel(f"and {len(everyone) - len(nodes)} more nodes")
    gantt.set_ylim(len(nodes) - 0.4, -0.6)
    gantt.tick_params(axis="x", length=0)
    _draw_world(strip, generations, begin, end)
    if len(generations) > 1:
        _legend(figure, gantt)
    _title(gantt, _timeline_fact(generations, end - begin), pad=20)
    return _save(figure, path)


def _nodes(generations: Sequence[GenerationRow]) -> list[str]:
    """Return the instances in the order of their coming."""
    names = [instance_of(NodeId(member.node_id)) for row in generations for member in row.members]
    return list(dict.fromkeys(names))


def _draw_generation(
    gantt: Axes, row: GenerationRow, times: tuple[float, float], nodes: Sequence[str]
) -> None:
    begin, end = times
    names = {instance_of(NodeId(member.node_id)) for member in row.members}
    places = [place for place, name in enumerate(nodes) if name in names]
    colour = (BLUE, SKY)[row.number % 2]
    gantt.barh(
        places, end - begin, left=begin, height=0.62, color=colour, edgecolor="white", linewidth=0.8, zorder=2
    )


def _draw_faults(
    gantt: Axes, before: GenerationRow, row: GenerationRow, at: float, nodes: Sequence[str]
) -> None:
    """Mark who was lost or failed (a cross), who left on purpose (a square) and who came (a triangle)."""
    marks: list[tuple[str, str, str]] = []
    old = {member.node_id for member in before.members}
    marks += [(member.node_id, "^", GREEN) for member in row.members if member.node_id not in old]
    is_fault = row.cause in (Cause.LOSS, Cause.FAILURE)
    marks += [(node, *(("X", VERMILION) if is_fault else ("s", ORANGE))) for node in row.lost]
    if row.cause is Cause.FAILURE and not row.lost:
        marks += [(member.node_id, "X", VERMILION) for member in row.members if member.node_id in row.reason]
    for node, shape, colour in marks:
        name = instance_of(NodeId(node))
        if name in nodes:
            gantt.plot(
                at, nodes.index(name), marker=shape, color=colour, markersize=9,
                markeredgecolor="white", markeredgewidth=0.8, zorder=4, clip_on=False,
            )  # fmt: skip


def _label_generations(
    gantt: Axes, generations: Sequence[GenerationRow], ends: Sequence[float], begin: float
) -> None:
    """Write each generation's number above its bars, unless it is too narrow for it."""
    whole = ends[-1] - begin
    above: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8, "color": "#555555"}
    gantt.annotate("generation", (0.0, 1.0), xycoords="axes fraction", xytext=(-5, 3), ha="right", **above)
    for row, until in zip(generations, ends, strict=True):
        if until - row.published_at >= 0.02 * whole:
            middle = (row.published_at + until) / 2 - begin
            place: dict[str, Any] = {
                "xy": (middle, 1.0),
                "xycoords": ("data", "axes fraction"),
                "xytext": (0, 3),
            }
            gantt.annotate(str(row.number), ha="center", **place, **above)


def _draw_world(strip: Axes, generations: Sequence[GenerationRow], begin: float, end: float) -> None:
    times = [0.0, *(row.published_at - begin for row in generations), end - begin]
    sizes = [0, *(row.world_size for row in generations), generations[-1].world_size]
    strip.step(times, sizes, where="post", color="#333333", linewidth=1.4)
    strip.fill_between(times, sizes, step="post", color="#333333", alpha=0.12)
    strip.set_ylim(0, max(sizes) * 1.25)
    strip.set_yticks([0, max(sizes)])
    strip.set_ylabel("workers", rotation=0, ha="right", va="center")
    strip.set_xlabel("seconds since the run started")
    strip.set_xlim(0, max(end - begin, 1e-3))
    _open(strip)


def _legend(figure: Figure, gantt: Axes) -> None:
    """Explain the marks on the line of the title, whatever the picture's height is."""
    from matplotlib.lines import Line2D
    from matplotlib.transforms import offset_copy

    kinds = (("lost or failed", "X", VERMILION), ("left on purpose", "s", ORANGE), ("joined", "^", GREEN))
    handles = [
        Line2D([], [], linestyle="", marker=shape, color=colour, markersize=7, label=name)
        for name, shape, colour in kinds
    ]
    gantt.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, frameon=False, fontsize=8,
        bbox_transform=offset_copy(gantt.transAxes, figure, y=18, units="points"),
        borderaxespad=0, handletextpad=0.2, columnspacing=1.0,
    )  # fmt: skip


def _timeline_fact(generations: Sequence[GenerationRow], wall_s: float) -> str:
    sizes = [len(row.members) for row in generations]
    if len(generations) == 1:
        nodes = "node" if sizes[0] == 1 else "nodes"
        return f"{sizes[0]} {nodes} trained together without a change"
    cost = sum(row.cost_s for row in generations)
    shown = " → ".join(map(str, sizes)) if len(sizes) <= 8 else f"{min(sizes)} to {max(sizes)}"
    return f"{shown} nodes; the changes cost {cost:.1f} of {wall_s:.0f} s"


# ---- where the time went ---------------------------------------------------------------------

_COLOURS: Final = {
    Spent.TRAIN: BLUE,
    Spent.EVALUATE: SKY,
    Spent.CHECKPOINT: GREEN,
    Spent.PROVISION: GREY,
    Spent.TEARDOWN: GREY,
    Spent.WAIT_FOR_CAPACITY: ORANGE,
    Spent.DETECT: VERMILION,
    Spent.RENDEZVOUS: VERMILION,
    Spent.RESTART: VERMILION,
    Spent.REDO: PURPLE,
}


def draw_ledger(seconds: Mapping[Spent, float], path: Path, *, cost_s: float) -> bool:
    """Draw a bar for each class of the ledger that took time; False if none did.

    Args:
        seconds: By class.
        path: Of the picture.
        cost_s: What changes of the nodes cost, for the title.
    """
    rows = [(spent, took) for spent, took in seconds.items() if took > 0]
    whole = sum(took for _, took in rows)
    if not rows:
        return False
    figure = _figure(9, 1.3 + 0.34 * len(rows))
    bars = figure.subplots()
    bars.barh(
        [spent.replace("_", " ") for spent, _ in rows],
        [took for _, took in rows],
        color=[_COLOURS[spent] for spent, _ in rows],
        height=0.66,
    )
    for position, (_, took) in enumerate(rows):
        share = f"{100 * took / whole:.1f} %"
        bars.annotate(
            f"{took:.2f} s   {share}", (took, position),
            xytext=(5, 0), textcoords="offset points", va="center", fontsize=9,
        )  # fmt: skip
    bars.invert_yaxis()
    bars.set_xlim(0, max(took for _, took in rows) * 1.22)
    bars.set_xlabel("seconds")
    bars.tick_params(axis="y", length=0)
    trained = 100 * seconds.get(Spent.TRAIN, 0.0) / whole
    _title(bars, f"{trained:.0f} % of {whole:.1f} s were new steps; changes of the nodes cost {cost_s:.1f} s")
    return _save(figure, path)


# ---- champion and challenger -----------------------------------------------------------------

_CLASSES: Final = 20
"""More classes than so many are not drawn one by one: those that changed most are."""


def draw_comparison(challenger: Score, champion: Score | None, path: Path, *, fact: str) -> bool:
    """Draw confusion matrices side by side, and below them how each class fares.

    Args:
        challenger: The new model's score.
        champion: The score of the one in use, on the same samples.
        path: Of the picture.
        fact: What the gate decided, for the title.
    """
    scores = [("champion", champion)] if champion is not None else []
    scores.append(("challenger", challenger))
    figure = _figure(9, 7.4)
    rows: Any = figure.subfigures(2, 1, height_ratios=(1.25, 1))
    matrices = rows[0].subplots(1, len(scores), squeeze=False)[0]
    for axes, (name, score) in zip(matrices, scores, strict=True):
        _draw_confusion(axes, score)
        axes.set_title(f"{name}: {score.accuracy:.2%} of {score.samples}", fontsize=10, loc="left")
    _draw_recalls(rows[1].subplots(), challenger, champion)
    figure.suptitle(fact[:1].upper() + fact[1:], x=0.01, ha="left", fontsize=11, fontweight="bold")
    return _save(figure, path)


def _draw_confusion(axes: Any, score: Score) -> None:
    """Shade each row by its own sum, for classes differ in size; counts stand where there is room."""
    shares = [[cell / (sum(row) or 1) for cell in row] for row in score.confusion]
    axes.imshow(shares, cmap="Blues", vmin=0, vmax=1)
    places = range(len(score.classes))
    if len(score.classes) <= _CLASSES:
        axes.set_xticks(places, score.classes, rotation=90 if max(map(len, score.classes)) > 2 else 0)
        axes.set_yticks(places, score.classes)
        for row in places:
            for column in places:
                if count := score.confusion[row][column]:
                    colour = "white" if shares[row][column] > 0.5 else VERMILION
                    axes.text(column, row, count, ha="center", va="center", fontsize=7, color=colour)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.tick_params(length=0, labelsize=8)
    axes.set_xlabel("named class", fontsize=9)
    axes.set_ylabel("true class", fontsize=9)


def _draw_recalls(axes: Axes, challenger: Score, champion: Score | None) -> None:
    after = challenger.recalls()
    before = champion.recalls() if champion is not None else {}
    names = sorted(after, key=lambda name: -abs(after[name] - before.get(name, after[name])))[:_CLASSES]
    names = [name for name in challenger.classes if name in names]
    width = 0.38 if before else 0.7
    if before:
        left = [place - width / 2 for place in range(len(names))]
        axes.bar(left, [100 * before.get(name, 0.0) for name in names], width, color=GREY, label="champion")
    right = [place + (width / 2 if before else 0) for place in range(len(names))]
    axes.bar(right, [100 * after[name] for name in names], width, color=BLUE, label="challenger")
    axes.set_xticks(range(len(names)), names, fontsize=8, rotation=45 if max(map(len, names)) > 4 else 0)
    figures = [*after.values(), *before.values()]
    lowest = max(0.0, 100 * min(figures) - 5) if figures and min(figures) > 0.5 else 0.0
    axes.set_ylim(lowest, 100.5)
    axes.set_ylabel("rightly named in %" + (f", from {lowest:.0f}" if lowest else ""), fontsize=9)
    axes.tick_params(axis="x", length=0)
    if before:
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, frameon=False, fontsize=8)
    _open(axes)


# ---- common ----------------------------------------------------------------------------------


def _figure(width: float, height: float) -> Figure:
    """Return a figure that draws to memory only: no window system, no state of the process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _title(axes: Axes, fact: str, pad: float = 8) -> None:
    axes.set_title(fact[:1].upper() + fact[1:], loc="left", fontsize=11, fontweight="bold", pad=pad)
    _open(axes)


def _open(axes: Axes) -> None:
    """Leave the frame open above and on the right."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _save(figure: Figure, path: Path) -> bool:
    draft = path.with_name(f".{path.name}.draft")
    figure.savefig(draft, format="png")
    draft.replace(path)
    return True
