"""Champion and challenger side by side: as a file for people, one for programs, and a page in the UI."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from elastic_core.quality.gate import Gate, Verdict
from elastic_core.quality.score import Score
from tasks.pictures import as_data_uri, draw_comparison

PICTURE: Final = "comparison.png"
PAGE: Final = "comparison.html"
_MOST_CLASSES: Final = 50

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "table{border-collapse:collapse;margin:1rem 0}td,th{padding:.2rem .8rem;text-align:right;"
    "border-bottom:1px solid #ddd}td:first-child,th:first-child{text-align:left}img{max-width:100%}"
    ".yes{color:#00664b}.no{color:#b34700}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the gate saw, and what it said.

    Attributes:
        champion: Score of the model in use on the same samples, None if there was none.
        champion_number: Its version.
        news: What is new in the data, or in what is trained.
    """

    job: str
    run: str
    news: str
    gate: Gate
    verdict: Verdict
    challenger: Score
    champion: Score | None = None
    champion_number: int | None = None

    @property
    def headline(self) -> str:
        """The decision in a few words, with its first reason."""
        return f"{'promoted' if self.verdict.is_promoted else 'refused'}: {self.verdict.reasons[0]}"

    def rows(self) -> Iterator[tuple[str, str, str, str, str]]:
        """Yield name, samples, the champion's figure, the challenger's, and the difference in points."""
        old = self.champion.recalls() if self.champion else {}
        new, support = self.challenger.recalls(), self.challenger.support()
        overall = self.champion.accuracy if self.champion else None
        yield _row("all classes", self.challenger.samples, overall, self.challenger.accuracy)
        worst_first = sorted(new, key=lambda name: new[name] - old.get(name, new[name]))
        for name in worst_first[:_MOST_CLASSES]:
            yield _row(name, support[name], old.get(name), new[name])


class _Facts(BaseModel):
    """`comparison.json`: what another program needs to judge the decision."""

    model_config = ConfigDict(frozen=True)

    job: str
    run: str
    news: str
    is_promoted: bool
    reasons: tuple[str, ...]
    gate: Gate
    champion_number: int | None
    champion: Score | None
    challenger: Score


def write(comparison: Comparison, directory: Path) -> Path:
    """Write picture, page and facts into a directory; return the page's path."""
    draw_comparison(comparison.challenger, comparison.champion, directory / PICTURE, fact=comparison.headline)
    facts = _Facts(
        job=comparison.job,
        run=comparison.run,
        news=comparison.news,
        is_promoted=comparison.verdict.is_promoted,
        reasons=comparison.verdict.reasons,
        gate=comparison.gate,
        champion_number=comparison.champion_number,
        champion=comparison.champion,
        challenger=comparison.challenger,
    )
    (directory / "comparison.json").write_text(facts.model_dump_json(indent=2) + "\n")
    page = directory / PAGE
    page.write_text(_html(comparison, as_data_uri(directory / PICTURE)))
    return page


def markdown(comparison: Comparison, directory: Path, *, version: int) -> str:
    """Return the page for the UI; the picture was written into `directory` before."""
    rows = [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in comparison.rows()]
    lines = [
        f"# {comparison.job}, version {version}: {comparison.headline}",
        *(f"- {reason}" for reason in comparison.verdict.reasons[1:]),
        f"New: {comparison.news}",
        f"![champion and challenger]({as_data_uri(directory / PICTURE)})",
        "\n".join(
            [f"| | samples | {_champion(comparison)} | challenger | points |", "|---|--:|--:|--:|--:|", *rows]
        ),
        f"Rules: {_rules(comparison.gate)}",
        f"Trained by run `{comparison.run}`; model: `{directory}`",
    ]
    return "\n\n".join(lines)


def _html(comparison: Comparison, picture: str) -> str:
    cells = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in comparison.rows()]
    kind = "yes" if comparison.verdict.is_promoted else "no"
    reasons = "".join(f"<li>{html.escape(reason)}</li>" for reason in comparison.verdict.reasons)
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        f"<title>{html.escape(comparison.job)}: {kind}</title><style>{_STYLE}</style>"
        f"<h1 class={kind}>{html.escape(comparison.job)}: {html.escape(comparison.headline)}</h1>"
        f"<p>New: {html.escape(comparison.news)}</p><ul>{reasons}</ul>"
        f'<img alt="confusion matrices and recall by class" src="{picture}">'
        f"<table><tr><th></th><th>samples</th><th>{_champion(comparison)}</th><th>challenger</th>"
        f"<th>points</th></tr>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"
        f"<p>Rules: {html.escape(_rules(comparison.gate))}</p>"
        f"<p>Trained by run {html.escape(comparison.run)}</p></html>\n"
    )


def _champion(comparison: Comparison) -> str:
    number = comparison.champion_number
    return "champion" if number is None else f"champion (version {number})"


def _rules(gate: Gate) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in gate.model_dump().items())


def _row(name: str, samples: int, old: float | None, new: float) -> tuple[str, str, str, str, str]:
    before = "" if old is None else f"{old:.2%}"
    return name, str(samples), before, f"{new:.2%}", "" if old is None else f"{100 * (new - old):+.2f}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
