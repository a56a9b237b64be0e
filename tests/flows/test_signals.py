"""A signal is kept until the flow can follow it, and breaks nothing off."""

import os
import signal

import pytest

from flows.signals import StopSignals

SIGNALS = [(signal.SIGINT, "Ctrl-C"), (signal.SIGTERM, "SIGTERM")]


@pytest.mark.parametrize(("number", "name"), SIGNALS)
def test_a_signal_is_kept_and_interrupts_nothing(number: signal.Signals, name: str) -> None:
    with StopSignals() as signals:
        assert signals.asked() == ""
        os.kill(os.getpid(), number)
        assert signals.asked() == name


def test_the_first_signal_names_the_stop_and_the_listener_hears_each() -> None:
    heard: list[str] = []
    with StopSignals() as signals:
        signals.tell(lambda: heard.append(signals.asked()))
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    assert heard == ["SIGTERM", "SIGTERM"]


def test_who_asks_twice_while_nobody_listens_is_not_kept_waiting() -> None:
    with StopSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_start_that_waits_is_broken_off_where_it_waits_and_a_run_is_not() -> None:
    with StopSignals() as signals:
        signals.pause(0)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signals.pause(60)
        signals.tell(lambda: None)
        signals.pause(0)


def test_what_is_left_to_do_is_not_broken_off() -> None:
    with StopSignals() as signals:
        signals.ignore()
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert signals.asked() == "Ctrl-C"


def test_afterwards_ctrl_c_interrupts_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before
    assert signal.getsignal(signal.SIGINT) is before
