"""What a worker's pulse says to whom looks at it."""

import os
from pathlib import Path

from elastic_core.pulse import PULSE_FILE, Beat, Doing, Pulse, read_beat
from elastic_core.testing.clock import ManualClock


def test_work_is_the_time_of_a_step_without_that_of_waiting_for_peers(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "pulse"
    began = clock.monotonic()
    pulse = Pulse(file, now=clock.monotonic)
    pulse.begin_step(7)
    clock.advance(0.25)
    with pulse.waiting():
        clock.advance(5.0)
        waiting = read_beat(file)
    clock.advance(0.5)
    pulse.end_step()
    assert (waiting.doing, waiting.step, waiting.since) == (Doing.WAITING, 7, began + 0.25)
    ended = read_beat(file)
    assert (ended.doing, ended.done, ended.work, ended.longest) == (Doing.OTHER, 1, 0.75, 0.75)
    assert ended.pid == os.getpid()


def test_a_wait_outside_of_a_step_is_no_work(tmp_path: Path) -> None:
    clock, file = ManualClock(), tmp_path / "pulse"
    pulse = Pulse(file, now=clock.monotonic)
    pulse.do(Doing.OTHER)
    with pulse.waiting():
        clock.advance(1.0)
    assert read_beat(file).doing is Doing.OTHER
    pulse.begin_step(0)
    pulse.end_step()
    assert read_beat(file).work == 0


def test_a_pulse_begins_anew_in_the_file_of_the_one_before(tmp_path: Path) -> None:
    file = tmp_path / "pulse"
    Pulse(file).begin_step(3)
    Pulse.of({PULSE_FILE: str(file)})
    assert read_beat(file) == Beat(pid=os.getpid())


def test_who_keeps_no_pulse_says_nothing(tmp_path: Path) -> None:
    Pulse.of({}).begin_step(1)
    assert read_beat(tmp_path / "none") == Beat()
    (tmp_path / "cut").write_bytes(b"\0")
    assert read_beat(tmp_path / "cut") == Beat()
