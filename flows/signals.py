"""Signals while a run is ended: they may shorten a wait, but not break off the ending."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_NUMBERS = (signal.SIGINT, signal.SIGTERM)


@contextmanager
def patient(hurry: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM call `hurry` and interrupt nothing.

    Outside the main thread no signal interrupts anyway, and nothing is done.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def hear(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        hurry()

    before = {number: signal.signal(number, hear) for number in _NUMBERS}
    try:
        yield
    finally:
        for number, handler in before.items():
            # A handler that was not set from Python reads as None and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
