"""Ctrl-C and SIGTERM as wishes that are kept until the flow can follow them.

An exception out of a signal handler lands between any two instructions: also where a lock was just
taken and its `with` has not begun, and then whoever needs that lock (a logging thread, a watch, the
interpreter's own exit) waits for ever. So within a run no signal raises; the loop looks at what was
asked each time it is woken, and that is at once.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Final, Self

_NAMES: Final = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM"}
_PIECE_S: Final = 0.2


class StopSignals:
    """Keeps the first signal, and tells a listener of each; a context manager.

    Until somebody listens, a second signal raises `KeyboardInterrupt`: what starts may take long, and
    who asks twice does not want to wait for it. Outside the main thread no signal is delivered, and
    nothing is done.
    """

    def __init__(self) -> None:
        self._asked = ""
        self._listener: Callable[[], None] | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        """Take over both signals."""
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._hear) for number in _NAMES}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Give them back."""
        for number, handler in self._before.items():
            # A handler that was not set from Python reads as None and cannot be put back.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)  # type: ignore[arg-type]

    def asked(self) -> str:
        """Return what asked to stop, for people; "" if nothing did."""
        return self._asked

    def tell(self, listener: Callable[[], None]) -> None:
        """Let `listener` hear of each signal from now on; it must take no lock that is not reentrant."""
        self._listener = listener

    def ignore(self) -> None:
        """Let no further signal do anything: what is left to do ends by itself."""
        self._listener = lambda: None

    def pause(self, seconds: float) -> None:
        """Sleep; while nobody listens, a signal ends what starts here, where nothing is half done.

        Raises:
            KeyboardInterrupt: Somebody asked to stop, before or meanwhile.
        """
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            self._end_what_starts()
            time.sleep(min(left, _PIECE_S))
        self._end_what_starts()

    def _end_what_starts(self) -> None:
        if self._asked and self._listener is None:
            raise KeyboardInterrupt

    def _hear(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        again, self._asked = bool(self._asked), self._asked or _NAMES[signal.Signals(number)]
        if self._listener is not None:
            self._listener()
        elif again:
            raise KeyboardInterrupt
