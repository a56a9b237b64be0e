"""While a run is ended, a signal shortens a wait and breaks nothing off."""

import os
import signal

import pytest

from flows.signals import patient


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_counted_and_interrupts_nothing(number: signal.Signals) -> None:
    heard: list[str] = []
    with patient(lambda: heard.append("hurry")):
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
    assert heard == ["hurry", "hurry"]


def test_afterwards_ctrl_c_interrupts_again() -> None:
    before = signal.getsignal(signal.SIGINT)
    with patient():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
