"""Pictures are checked by what is drawn (labels, marks, size), and were looked at."""

import base64
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from elastic_core.events.ledger import Spent
from elastic_core.events.report import GenerationRow, build_report
from elastic_core.model.membership import Cause
from elastic_core.quality.score import Score
from tasks import pictures
from tests.elastic_core.events.records import ZERO, evaluation, generation, record, step


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """All figures that were saved, for a look at what is in them."""
    saved: list[Figure] = []
    save = pictures._save

    def keep(figure: Figure, path: Path) -> bool:
        saved.append(figure)
        return save(figure, path)

    monkeypatch.setattr(pictures, "_save", keep)
    return saved


def rows(*entries: Any) -> tuple[GenerationRow, ...]:
    return build_report(record(history=entries)).generations


def title(figure: Figure) -> str:
    return figure.axes[0].get_title(loc="left")


def test_the_curve_says_what_was_reached_and_marks_the_changes(tmp_path: Path, figures: list[Figure]) -> None:
    lines = [step(n, n, world_size=2, figures={"loss": 2.0 - n / 10}) for n in range(8)]
    lines += [step(n, n, g=2, world_size=1, figures={"loss": 2.0 - n / 10}) for n in range(6, 12)]
    lines += [evaluation(12, 13, g=2, test_accuracy=0.981)]
    assert pictures.draw_curve(lines, tmp_path / "curve.png")
    (figure,) = figures
    assert (
        title(figure)
        == "98.1 % of the test samples are right after 12 steps, through 1 change of the workers (w)"
    )
    loss = figure.axes[0]
    assert list(loss.lines[0].get_xdata()) == [*range(1, 13)], (
        "step 6 and 7 of the lost lineage are not shown"
    )
    assert list(loss.lines[1].get_xdata()) == [6, 6]
    assert [text.get_text() for text in loss.texts] == ["2 w", "1 w"]


def test_the_sizes_of_short_lived_groups_do_not_overlap(tmp_path: Path, figures: list[Figure]) -> None:
    worlds = [1] * 40 + [2, 3, 4] + [5] * 57
    lines = [step(n, n, g=size, world_size=size, figures={"loss": 1.0}) for n, size in enumerate(worlds)]
    assert pictures.draw_curve(lines, tmp_path / "curve.png")
    texts = figures[0].axes[0].texts
    assert [text.get_text() for text in texts] == ["1 w", "2 w"]
    boxes = [text.get_window_extent() for text in texts]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


def test_without_an_evaluation_the_curve_tells_how_the_loss_fell(
    tmp_path: Path, figures: list[Figure]
) -> None:
    lines = [step(n, n, figures={"loss": 2.5 / (n + 1)}) for n in range(10)]
    assert pictures.draw_curve(lines, tmp_path / "curve.png")
    assert (
        title(figures[0]) == "The loss fell from 2.5 to 0.25 after 10 steps, with the same workers throughout"
    )


def test_a_long_training_makes_a_small_picture(tmp_path: Path, figures: list[Figure]) -> None:
    lines = [step(n, n, g=1 + n // 1000, figures={"loss": (n * 7919 % 1000) / 1000}) for n in range(20_000)]
    assert pictures.draw_curve(lines, tmp_path / "curve.png")
    assert len(figures[0].axes[0].lines[0].get_xdata()) <= 2000
    assert (tmp_path / "curve.png").stat().st_size < 200_000


def test_without_a_step_there_is_no_curve(tmp_path: Path) -> None:
    assert not pictures.draw_curve([evaluation(1, 1, test_accuracy=1.0)], tmp_path / "curve.png")
    assert not list(tmp_path.iterdir())


def test_the_timeline_has_a_row_a_node_and_a_mark_for_each_that_came_or_went(
    tmp_path: Path, figures: list[Figure]
) -> None:
    generations = rows(
        generation(1, "ab", published=5),
        generation(2, "a", Cause.LOSS, detected=20, published=21, lost={"b": "lease ended"}),
        generation(3, "ac", Cause.JOIN, detected=40, published=40),
        generation(4, "c", Cause.DRAIN, detected=60, published=60, lost={"a": "drained"}),
        generation(5, "c", Cause.FAILURE, detected=80, published=80, reason="rank 0 on node c.1: died"),
    )
    assert pictures.draw_timeline(generations, tmp_path / "timeline.png", begin=ZERO, end=ZERO + 100)
    gantt, strip = figures[0].axes
    assert [label.get_text() for label in gantt.get_yticklabels()] == ["a", "b", "c"]
    marks = [(line.get_marker(), line.get_xdata()[0], line.get_ydata()[0]) for line in gantt.lines]
    assert marks == [("X", 21.0, 1), ("^", 40.0, 2), ("s", 60.0, 0), ("X", 80.0, 2)]
    assert [text.get_text() for text in gantt.texts] == ["generation", "1", "2", "3", "4", "5"]
    assert list(strip.lines[0].get_ydata()) == [0, 2, 1, 2, 1, 1, 1]
    assert title(figures[0]).startswith("2 → 1 → 2 → 1 → 1 nodes; the changes cost ")


def test_the_numbers_of_short_generations_do_not_overlap(tmp_path: Path, figures: list[Figure]) -> None:
    entries = [generation(n, "ab", Cause.JOIN, published=5 + n * 0.1) for n in range(1, 11)]
    generations = rows(*entries, generation(11, "ab", Cause.JOIN, published=50))
    assert pictures.draw_timeline(generations, tmp_path / "timeline.png", begin=ZERO, end=ZERO + 100)
    figure = figures[0]
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: float(box.x0))
    assert [text.get_text() for text in figure.axes[0].texts] == ["generation", "10", "11"]
    assert all(left.x1 < right.x0 for left, right in pairwise(boxes))


@pytest.mark.parametrize("nodes", [1, 400])
def test_any_number_of_nodes_fits(tmp_path: Path, nodes: int) -> None:
    row = rows(generation(1, "a", published=1))[0]
    members = tuple(row.members[0].model_copy(update={"node_id": f"node-{n}.1"}) for n in range(nodes))
    path = tmp_path / "timeline.png"
    crowded = row.model_copy(update={"members": members})
    assert pictures.draw_timeline([crowded], path, begin=ZERO, end=ZERO + 9)
    assert path.stat().st_size < 200_000


def test_the_ledger_has_a_labelled_bar_for_each_class_that_took_time(
    tmp_path: Path, figures: list[Figure]
) -> None:
    seconds = dict.fromkeys(Spent, 0.0) | {Spent.TRAIN: 15.0, Spent.WAIT_FOR_CAPACITY: 5.0}
    assert pictures.draw_ledger(seconds, tmp_path / "ledger.png", cost_s=5.0)
    bars = figures[0].axes[0]
    assert [label.get_text() for label in bars.get_yticklabels()] == ["wait for capacity", "train"]
    assert [text.get_text() for text in bars.texts] == ["5.00 s   25.0 %", "15.00 s   75.0 %"]
    assert title(figures[0]) == "75 % of 20.0 s were new steps; changes of the nodes cost 5.0 s"
    assert not pictures.draw_ledger(dict.fromkeys(Spent, 0.0), tmp_path / "none.png", cost_s=0)


def test_a_picture_becomes_an_address_that_holds_it(tmp_path: Path) -> None:
    pictures.draw_ledger({Spent.TRAIN: 1.0}, tmp_path / "ledger.png", cost_s=0)
    head, data = pictures.as_data_uri(tmp_path / "ledger.png").split(",")
    assert head == "data:image/png;base64"
    assert base64.b64decode(data) == (tmp_path / "ledger.png").read_bytes()
    assert len(data) < 200_000


def test_a_picture_that_cannot_be_drawn_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "ledger.png").mkdir()
    report = build_report(record(lines=(step(0, 9, figures={"loss": 1.0}),)))
    drawn = pictures.draw_all(report, [step(0, 9, figures={"loss": 1.0})], tmp_path)
    assert drawn == ("curve.png",)


def test_nobody_pays_for_the_drawing_library_before_something_is_drawn() -> None:
    code = "import sys, tasks.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_champion_and_challenger_stand_side_by_side_with_every_class(
    tmp_path: Path, figures: list[Figure]
) -> None:
    champion = Score(classes=("cat", "dog"), confusion=((9, 1), (4, 6)))
    challenger = Score(classes=("cat", "dog"), confusion=((8, 2), (0, 10)))
    fact = "promoted: accuracy 90.00%"
    assert pictures.draw_comparison(challenger, champion, tmp_path / "comparison.png", fact=fact)
    (figure,) = figures
    matrices, bars = figure.axes[:2], figure.axes[2]
    assert title(figure) == "champion: 75.00% of 20"
    assert matrices[1].get_title(loc="left") == "challenger: 90.00% of 20"
    assert sorted(text.get_text() for text in matrices[1].texts) == ["10", "2", "8"]
    assert [round(bar.get_height()) for bar in bars.patches] == [90, 60, 80, 100]
    assert (tmp_path / "comparison.png").stat().st_size < 200_000


def test_of_many_classes_those_that_changed_most_are_drawn(tmp_path: Path, figures: list[Figure]) -> None:
    count = 60
    names = tuple(f"class{number}" for number in range(count))
    before = [[10 if row == column else 0 for column in range(count)] for row in range(count)]
    after = [list(row) for row in before]
    after[50][50], after[50][0] = 5, 5
    scores = [Score(classes=names, confusion=tuple(map(tuple, rows))) for rows in (after, before)]
    assert pictures.draw_comparison(scores[0], scores[1], tmp_path / "comparison.png", fact="refused")
    shown = [label.get_text() for label in figures[0].axes[2].get_xticklabels()]
    assert (len(shown), "class50" in shown) == (20, True)
