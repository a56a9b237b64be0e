"""Each trace's events still cause exactly the reactions that its file shows.

`python -m tests.golden --update` rewrites the reactions; the diff is what is reviewed.
"""

from pathlib import Path

import pytest

from elastic_core.testing.scenario import play
from tests.golden.files import replayed, trace_files


@pytest.mark.parametrize("path", trace_files(), ids=lambda path: path.stem)
def test_reactions_are_those_of_the_file(path: Path) -> None:
    assert replayed(path) == path.read_text()


@pytest.mark.parametrize(
    "path",
    # Where commits are told by hand, one is in flight between the lines and is rightly written again.
    [path for path in trace_files() if "commits=manual" not in path.read_text()],
    ids=lambda path: path.stem,
)
def test_a_successor_after_any_event_publishes_nothing_for_its_own_sake(path: Path) -> None:
    """L4 on every story: a take-over at a quiet moment is answered by a wait or a known question."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("    ")]
    events = [index for index, line in enumerate(lines) if line.startswith("t=")]
    for index in events:
        clock = lines[index].split()[0]
        story = play("\n".join([*lines[: index + 1], f"{clock} takeover"]))
        reaction = story.split(" takeover\n")[-1]
        assert "publish" not in reaction, story


def test_a_line_that_is_no_event_is_named() -> None:
    with pytest.raises(ValueError, match="line 2: 't=0 sene a' is no event; known: seen, gone"):
        play("policy min=1\nt=0 sene a\n")


def test_the_policy_comes_first() -> None:
    with pytest.raises(ValueError, match="line 1: the policy line must come first"):
        play("t=0 seen a\n")
