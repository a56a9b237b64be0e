"""When a worker counts as hung, and when it does not."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from elastic_core.agent.hang import FACTOR, FLOOR, UNKNOWN, Hang, HangDetector
from elastic_core.pulse import Beat, Doing

WORKING = Beat(pid=7, doing=Doing.WORKING, step=12, done=3, since=100.0, work=0.1, longest=0.2)


def watch(detector: HangDetector, beat: Beat, seconds: int, *, is_stopped: bool = False) -> list[Hang]:
    """Look once a second at a pulse that does not change."""
    looks = (detector.look(beat, is_stopped=is_stopped, now=float(second)) for second in range(seconds + 1))
    return [hang for hang in looks if hang is not None]


def test_a_worker_that_does_not_come_to_the_collective_is_told_once() -> None:
    assert watch(HangDetector(declared=5, period=1), WORKING, 20) == [
        Hang(seconds=5.0, step=12, is_stopped=False)
    ]


def test_who_waits_for_a_peer_or_does_what_has_no_measure_is_never_hung() -> None:
    for doing in (Doing.WAITING, Doing.OTHER, Doing.NOTHING):
        assert watch(HangDetector(declared=5, period=1), replace(WORKING, doing=doing), 10_000) == []


def test_a_stopped_process_hangs_even_while_it_waits() -> None:
    waiting = replace(WORKING, doing=Doing.WAITING)
    assert watch(HangDetector(declared=5, period=1), waiting, 20, is_stopped=True) == [
        Hang(seconds=5.0, step=12, is_stopped=True)
    ]


def test_the_limit_follows_from_the_longest_step_and_has_a_floor() -> None:
    detector = HangDetector(declared=0, period=1)
    assert detector.limit(WORKING, is_stopped=False) == FLOOR
    assert detector.limit(replace(WORKING, longest=10.0), is_stopped=False) == FACTOR * 10
    assert detector.limit(replace(WORKING, done=0, longest=0.0), is_stopped=False) == UNKNOWN
    assert HangDetector(declared=2, period=1).limit(WORKING, is_stopped=False) == 2


@given(st.lists(st.tuples(st.floats(0.01, 4.9), st.booleans()), max_size=50))
def test_a_worker_whose_pulse_moves_within_the_limit_is_never_accused(
    turns: list[tuple[float, bool]],
) -> None:
    detector = HangDetector(declared=5, period=5)
    beat, now = WORKING, 0.0
    for pause, is_looked_at_twice in turns:
        beat = replace(beat, step=beat.step + 1, since=beat.since + pause)
        for at in (now, now + pause) if is_looked_at_twice else (now,):
            assert detector.look(beat, is_stopped=False, now=at) is None
        now += pause


def test_time_in_which_the_watcher_itself_stood_still_accuses_nobody() -> None:
    detector = HangDetector(declared=30, period=1)
    for now in (0.0, 1.0, 1_000.0, 1_001.0):
        assert detector.look(WORKING, is_stopped=False, now=now) is None
