"""In front of a Docker engine: counts the calls that create something, and lets one of them go wrong."""

from __future__ import annotations

import os
import re
import socket
import socketserver
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

How = Literal["fails", "lost"]

ENGINE = "/var/run/docker.sock"
CREATES = re.compile(r"POST /v[\d.]+/(?:networks/create|containers/create|containers/\w+/start)\b")
REFUSAL = (
    b"HTTP/1.1 500 Injected\r\nContent-Type: application/json\r\nContent-Length: 22\r\n"
    b'Connection: close\r\n\r\n{"message":"injected"}'
)


@dataclass
class EngineDoor:
    """A socket that passes every call on to the engine; a context manager.

    Attributes:
        path: Of the socket, for `DOCKER_HOST`.
        at: Which creating call goes wrong, counted from 1; 0: none.
        how: "fails": it is refused, and so are those after it; "lost": it is done, and its answer is lost.
        fired: Set when it went wrong.
    """

    path: Path
    at: int = 0
    how: How = "fails"
    calls: int = 0
    fired: threading.Event = field(default_factory=threading.Event)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def host(self) -> str:
        return f"unix://{self.path}"

    def __enter__(self) -> Self:
        door = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                door._serve(self.request)

        self._server = socketserver.ThreadingUnixStreamServer(str(self.path), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self.path.unlink()

    def arm(self, at: int, how: How) -> None:
        """Let the next calls be counted anew, and one of them go wrong."""
        with self._lock:
            self.at, self.how, self.calls = at, how, 0
            self.fired.clear()

    def _serve(self, client: socket.socket) -> None:
        """Pass on one call: who asked for a kept connection gets another one for the next."""
        request = _read_request(client)
        if not request:
            return
        verdict = self._judge(request)
        if verdict == "fails":
            client.sendall(REFUSAL)
            return
        with socket.socket(socket.AF_UNIX) as engine:
            engine.connect(ENGINE)
            engine.sendall(request.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
            while data := engine.recv(65536):
                if verdict != "lost":
                    client.sendall(data)
        if verdict == "lost":
            self.fired.set()  # the engine has done it

    def _judge(self, request: bytes) -> How | None:
        if not CREATES.match(request.split(b"\r\n", 1)[0].decode()):
            return None
        with self._lock:
            self.calls += 1
            if not self.at or self.calls < self.at or (self.how == "lost" and self.calls > self.at):
                return None
        if self.how == "fails":
            self.fired.set()
        return self.how


def _read_request(client: socket.socket) -> bytes:
    data = b""
    while b"\r\n\r\n" not in data:
        if not (more := client.recv(65536)):
            return b""
        data += more
    head, _, body = data.partition(b"\r\n\r\n")
    found = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    while len(body) < (int(found[1]) if found else 0):
        if not (more := client.recv(65536)):
            return b""
        body += more
    head = re.sub(rb"(?i)\r\nconnection:[^\r]*", b"", head)
    return head + b"\r\n\r\n" + body


def in_front_of_the_engine(directory: Path) -> EngineDoor:
    """Return a door whose socket's path is short enough."""
    return EngineDoor(directory / f"d{os.getpid()}.sock")
