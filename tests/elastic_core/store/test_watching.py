from __future__ import annotations

from collections.abc import Iterator

import pytest

from elastic_core.errors import StoreRefused, StoreUnavailable
from elastic_core.ids import NO_LEASE, Revision
from elastic_core.store.protocol import Entry, KeyDeleted, Snapshot, WatchEvent, WatchRestarted
from elastic_core.store.watching import ResumingWatch, distinct


class ScriptedSource:
    """Reads and streams as written down: an exception in place of either is raised."""

    def __init__(
        self, reads: list[Snapshot | Exception], streams: list[list[WatchEvent | Exception]]
    ) -> None:
        self.reads = iter(reads)
        self.streams = iter(streams)
        self.followed: list[int] = []

    def read(self) -> Snapshot:
        read = next(self.reads)
        if isinstance(read, Exception):
            raise read
        return read

    def follow(self, since: Revision) -> Iterator[WatchEvent]:
        self.followed.append(since)
        for event in next(self.streams):
            if isinstance(event, Exception):
                raise event
            yield event

    def cancel(self) -> None:
        pass


def snapshot(revision: int, *keys: str) -> Snapshot:
    entries = tuple(Entry(key, b"", Revision(1), Revision(1), NO_LEASE) for key in keys)
    return Snapshot(entries, Revision(revision))


AWAY = StoreUnavailable("arranged")
GONE = KeyDeleted("/a", Revision(6))


def test_after_a_break_or_an_end_it_reads_again_and_follows_from_there() -> None:
    source = ScriptedSource([snapshot(5, "/a"), AWAY, snapshot(9), snapshot(12)], [[GONE, AWAY], [], [GONE]])
    events = iter(ResumingWatch(source, name="/a"))

    assert [next(events) for _ in range(5)] == [
        WatchRestarted(snapshot(5, "/a")),
        GONE,
        WatchRestarted(snapshot(9)),
        WatchRestarted(snapshot(12)),
        GONE,
    ]
    assert source.followed == [6, 10, 13]


def test_a_refusal_reaches_the_iterator() -> None:
    watch = ResumingWatch(ScriptedSource([StoreRefused("permission denied")], []), name="/a")
    with pytest.raises(StoreRefused, match="permission denied"):
        next(iter(watch))


def test_a_closed_watch_yields_nothing() -> None:
    watch = ResumingWatch(ScriptedSource([], []), name="/a")
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
