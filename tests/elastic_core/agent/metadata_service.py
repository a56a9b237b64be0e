"""A metadata service on loopback: the emulator's own, with troubles that a test asks for."""

from __future__ import annotations

import json
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar, Self

import pytest

from tasks.emulator.host import machine

INTERRUPTION = "spot/instance-action"
REBALANCE = "events/recommendations/rebalance"


class _Troubled(machine.Metadata):
    """The emulator's service, which may be ill."""

    status: ClassVar[int] = 0
    released: ClassVar[threading.Event] = threading.Event()
    silent: ClassVar[bool] = False
    asked: ClassVar[Counter[str]] = Counter()
    changed: ClassVar[threading.Condition] = threading.Condition()

    def parse_request(self) -> bool:
        good = super().parse_request()
        with self.changed:
            self.asked[f"{self.command} {self.path}"] += 1
            self.changed.notify_all()
        if self.silent:
            self.released.wait(30)
        if self.status:
            self.say(self.status)
            return False
        return good


class MetadataDouble:
    """One machine's metadata service; a context manager."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._file = directory / "instance.json"
        monkeypatch.setattr(machine, "LAB", str(directory))
        self.handler = type(
            "Handler",
            (_Troubled,),
            {
                "tokens": {},
                "asked": Counter(),
                "released": threading.Event(),
                "changed": threading.Condition(),
            },
        )
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self.handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        self.say({})

    def __enter__(self) -> Self:
        threading.Thread(
            target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        ).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.handler.released.set()
        self.server.shutdown()
        self.server.server_close()

    def say(self, metadata: dict[str, str]) -> None:
        """Answer with these values from now on."""
        draft = self._file.with_suffix(".draft")
        draft.write_text(json.dumps({"metadata": metadata, "tags": {}}))
        draft.replace(self._file)

    def interrupt(self, seconds: float) -> None:
        """Announce that the machine is terminated after so many seconds."""
        at = datetime.now(UTC) + timedelta(seconds=seconds)
        notice = {"action": "terminate", "time": at.strftime("%Y-%m-%dT%H:%M:%SZ")}
        self.say({INTERRUPTION: json.dumps(notice)})

    def be_ill(self, status: int) -> None:
        """Answer everything with this status; 0: be well again."""
        self.handler.status = status

    def fall_silent(self) -> None:
        """Take questions and answer none."""
        self.handler.silent = True

    def forget_tokens(self) -> None:
        """End all tokens."""
        self.handler.tokens.clear()

    def wait_asked(self, times: int, question: str = "") -> int:
        """Wait until so many questions came that hold a text, and return how many did."""

        def count() -> int:
            return sum(number for text, number in self.handler.asked.items() if question in text)

        with self.handler.changed:
            assert self.handler.changed.wait_for(lambda: count() >= times, 30), self.handler.asked
            return count()
