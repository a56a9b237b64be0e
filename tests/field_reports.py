"""`python -m tests.field_reports [--update]`: is `docs/field-reports.md` the table of the marked tests?

What was reported and what is right is data, which tests hold it is read from their
markers `@pytest.mark.case(id)`, so that the page names no test that is not there.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "field-reports.md"
HEAD: Final = """# Field reports

What people met who run elastic training, and the tests that hold what is right instead.
`pytest -m case` runs them. Written by `python -m tests.field_reports --update` from
`tests/field_reports.toml` and the tests' markers.

| id | report | source | right | tests |
|---|---|---|---|---|
"""


@dataclass(frozen=True, slots=True)
class Report:
    """One report; its tests come from the markers."""

    report: str
    source: list[str]
    right: str


def reports() -> dict[str, Report]:
    """Return all reports by id."""
    data = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
    return {name: Report(**fields) for name, fields in data.items()}


def marked_tests() -> dict[str, list[str]]:
    """Return the node ids of the tests that carry an id, by id, without an import of any."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef):
                for name in _cases(node):
                    found.setdefault(name, []).append(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def page() -> str:
    """Return the text that the page should have."""
    tests = marked_tests()
    return HEAD + "".join(
        f"| {name} | {one.report} | {', '.join(one.source)} | {one.right} "
        f"| {'<br>'.join(f'`{test}`' for test in tests.get(name, []))} |\n"
        for name, one in reports().items()
    )


def main(arguments: list[str]) -> int:
    """Compare or write the page; return 1 if it is not current."""
    if "--update" in arguments:
        PAGE.write_text(page())
    return int(PAGE.read_text() != page())


def _cases(test: ast.FunctionDef) -> Iterator[str]:
    for decorator in test.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.case":
            yield from (str(ast.literal_eval(argument)) for argument in decorator.args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
