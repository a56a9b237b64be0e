from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.ids import Revision
from elastic_core.store.protocol import KeyDeleted, Snapshot, WatchEvent, WatchRestarted
from elastic_core.store.watching import ResumingWatch, distinct


class ScriptedSource:
    """Streams as written down: an exception among the events is raised."""

    def __init__(self, *streams: list[WatchEvent | Exception]) -> None:
        self.streams = iter(streams)

    def follow(self) -> Iterator[WatchEvent]:
        for event in next(self.streams):
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        pass


def restarted(revision: int) -> WatchRestarted:
    return WatchRestarted(Snapshot((), Revision(revision)))


AWAY = StoreUnavailable("arranged")
GONE = KeyDeleted("/a", Revision(6))


def test_after_a_break_or_an_end_it_begins_again() -> None:
    source = ScriptedSource([restarted(5), GONE, AWAY], [AWAY], [restarted(9)], [restarted(12), GONE])
    events = iter(ResumingWatch(source, name="/a"))

    assert [next(events) for _ in range(5)] == [restarted(5), GONE, restarted(9), restarted(12), GONE]


def test_a_refusal_reaches_the_iterator() -> None:
    watch = ResumingWatch(ScriptedSource([StoreRefused("permission denied")]), name="/a")
    with pytest.raises(StoreRefused, match="permission denied"):
        next(iter(watch))


def test_a_closed_watch_yields_nothing() -> None:
    watch = ResumingWatch(ScriptedSource(), name="/a")
    watch.close()
    assert list(watch) == []


@pytest.mark.parametrize(
    ("keys", "prefixes", "expected"),
    [
        (["/a", "/a"], [], (["/a"], [])),
        (["/p/a", "/b"], ["/p/"], (["/b"], ["/p/"])),
        ([], ["/p/", "/p/q/", "/p/"], ([], ["/p/"])),
        (["/p"], ["/p/"], (["/p"], ["/p/"])),
    ],
)
def test_what_another_prefix_covers_is_left_out(
    keys: list[str], prefixes: list[str], expected: tuple[list[str], list[str]]
) -> None:
    assert distinct(keys, prefixes) == expected
