"""Every relative link of the documentation leads somewhere, to the heading, too."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.fences import pages
from tests.docs.schemas import slug
from tests.docs.sources import ROOT

_CODE = re.compile(r"^```.*?^```$|`[^`\n]+`(?!\])", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\((?!https?://|mailto:)([^)\s]+)\)")
PAGES = [*pages(), *sorted((ROOT / "docs" / "adr").glob("*.md"))]


def broken(page: Path) -> Iterator[str]:
    for target in _LINK.findall(_CODE.sub("", page.read_text())):
        name, _, anchor = target.partition("#")
        place = (page.parent / name).resolve() if name else page
        if not place.exists():
            yield f"{target}: there is no such file"
        elif anchor and anchor not in anchors(place):
            yield f"{target}: there is no such heading; there are {', '.join(sorted(anchors(place)))}"


def anchors(page: Path) -> set[str]:
    text = _FENCED.sub("", page.read_text())
    return {slug(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    assert list(broken(page)) == []


def test_a_link_that_leads_nowhere_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A heading\n[a](none.md) [b](#a-heading) [c](#none) [d](https://example.org/none)\n")
    assert [line.split(":")[0] for line in broken(page)] == ["none.md", "#none"]


def test_every_page_is_reached_from_the_readme_or_the_front_page() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page.suffix != ".md":
            continue
        seen.add(page)
        links = (target.partition("#")[0] for target in _LINK.findall(page.read_text()))
        waiting += [
            (page.parent / link).resolve() for link in links if link and (page.parent / link).is_file()
        ]
    assert [page for page in pages() if page not in seen] == []
