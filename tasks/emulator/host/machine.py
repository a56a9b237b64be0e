"""Process 1 of an emulated EC2 machine: metadata service, user data, shutdown.

Runs in a container with the instance's own address, so it uses the standard
library only. `/machine/lab/instance.json` is what the emulator says of the
instance (it replaces the file whole), `/machine/lab/user-data` is its start script.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

LAB = "/machine/lab"
ADDRESS = "169.254.169.254"
TOKEN_HEADER = "X-aws-ec2-metadata-token"  # noqa: S105 (a header's name)


def facts() -> dict[str, dict[str, str]]:
    """Return what the emulator says of this instance now."""
    with open(f"{LAB}/instance.json") as file:  # noqa: PTH123 (no imports beyond need in process 1)
        known: dict[str, dict[str, str]] = json.load(file)
        return known


class Metadata(BaseHTTPRequestHandler):
    """IMDSv2: a PUT for a token, then GETs that carry it; 404 is the normal answer for notices."""

    tokens: ClassVar[dict[str, float]] = {}

    def do_PUT(self) -> None:
        """Hand out a token."""
        if self.path != "/latest/api/token":
            return self.say(404)
        ttl = self.headers.get(f"{TOKEN_HEADER}-ttl-seconds", "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            return self.say(400)
        token = secrets.token_urlsafe(32)
        self.tokens[token] = time.monotonic() + int(ttl)
        return self.say(200, token)

    def do_GET(self) -> None:
        """Answer a question that carries a valid token."""
        if self.tokens.get(self.headers.get(TOKEN_HEADER, ""), 0) < time.monotonic():
            return self.say(401)
        if self.path == "/latest/user-data":
            with open(f"{LAB}/user-data") as file:  # noqa: PTH123
                return self.say(200, file.read())
        value = facts()["metadata"].get(self.path.removeprefix("/latest/meta-data/"))
        return self.say(404) if value is None else self.say(200, value)

    def say(self, status: int, text: str = "") -> None:
        """Answer."""
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing: the machine's log is its user data's."""


def main() -> None:
    """Be a machine until SIGTERM or a shutdown."""
    subprocess.run(["ip", "addr", "add", f"{ADDRESS}/32", "dev", "lo"], check=False)
    server = ThreadingHTTPServer((ADDRESS, 80), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    boot = subprocess.Popen(["bash", f"{LAB}/user-data"], start_new_session=True)
    while not stopped.wait(0.2):
        if os.path.exists(f"{LAB}/halt"):  # noqa: PTH110
            break
        boot.poll()  # reaps it; a machine goes on when its start script ends
    if boot.poll() is None:
        os.killpg(boot.pid, signal.SIGKILL)
    sys.exit(0)


if __name__ == "__main__":
    main()
