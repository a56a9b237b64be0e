"""A hook of mkdocs: what a page links beside docs/ is linked in the repository, if it is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """Return a page whose links out of docs/ lead to the repository."""
    docs = Path(config["docs_dir"])
    root = docs.parent

    def outside(match: re.Match[str]) -> str:
        place = (docs / page.file.src_path).parent.joinpath(match[1]).resolve()
        if place.is_relative_to(docs) or not place.exists():
            return match[0]
        kind = "tree" if place.is_dir() else "blob"
        return f"]({config['repo_url']}/{kind}/main/{place.relative_to(root)}{match[2] or ''})"

    return _LINK.sub(outside, markdown)
