"""The fenced blocks of the documentation: commands, job files, and what is to be run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.docs.sources import ROOT

_FENCE: Final = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_PROGRAMS: Final = ("elastic-train", "elastic-agent", "make", "python")


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block.

    Attributes:
        mark: The HTML comment on the line above: "run", "not a job", or "".
    """

    page: Path
    line: int
    language: str
    mark: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> Iterator[list[str]]:
        """Yield the words of each command of ours; continued lines are joined, comments left out."""
        if self.language not in ("", "sh", "bash", "shell"):
            return
        for line in self.text.replace("\\\n", " ").splitlines():
            if re.match(rf"\s*(?:{'|'.join(_PROGRAMS)})(?:\s|$)", line):
                yield shlex.split(line, comments=True)


def pages() -> list[Path]:
    """Return every page that people read, pages of decisions left out: those are history."""
    here = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    infra = sorted((ROOT / "infra").rglob("README.md"))
    docs = sorted(page for page in (ROOT / "docs").rglob("*.md") if "adr" not in page.parts)
    return [*here, *infra, *docs]


def fences() -> list[Fence]:
    """Return the fenced blocks of all pages."""
    found = []
    for page in pages():
        text = page.read_text()
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            mark = match["mark"] or ""
            found.append(Fence(page, line, match["language"], mark, match["text"]))
    return found
