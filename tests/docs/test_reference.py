"""The pages of the reference say what the code says."""

from pathlib import Path

import pytest

from tests.docs.reference import PLACE, pages


@pytest.mark.parametrize("path", sorted(pages()), ids=lambda path: path.name)
def test_a_page_of_the_reference_is_current(path: Path) -> None:
    assert path.read_text() == pages()[path], "run: python -m tests.docs --update"


def test_no_page_of_the_reference_is_written_by_hand() -> None:
    assert set(PLACE.glob("*.md")) == set(pages())
