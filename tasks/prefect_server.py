"""The laptop's Prefect server: one process that outlives commands, with its record on disk.

An ephemeral server would cost 8 to 19 seconds a process and take the UI with it
(ADR 9). This one keeps its SQLite database under the given home.
"""

from __future__ import annotations

import errno
import os
import socket
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.model.codec import decode, encode
from tasks.process import ProcessIdentity, end, identify, is_running, spawn, wait_ended

HOME: Final = Path(".elastic")
FIRST_PORT: Final = 4200
LOOPBACK: Final = "127.0.0.1"
AUTH: Final = "PREFECT_SERVER_API_AUTH_STRING"
"""Environment variable of the server: `name:password` that everybody has to give."""
CLIENT_AUTH: Final = "PREFECT_API_AUTH_STRING"
"""The same for clients."""
START_DEADLINE_S: Final = 120.0


class ServerFailed(ElasticError):
    """The Prefect server did not come up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerRecord:
    """A server that was started from a home."""

    process: ProcessIdentity
    port: int
    host: str = LOOPBACK

    @property
    def url(self) -> str:
        """Address of the UI, from this machine."""
        return f"http://{LOOPBACK if self.host == '0.0.0.0' else self.host}:{self.port}"  # noqa: S104

    @property
    def api(self) -> str:
        """Value of PREFECT_API_URL."""
        return f"{self.url}/api"


def status(home: Path = HOME) -> ServerRecord | None:
    """Return the server that runs from this home, or None."""
    try:
        record = decode(ServerRecord, _record(home).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return record if is_running(record.process) else None


def is_healthy(record: ServerRecord) -> bool:
    """Return whether the server answers."""
    try:
        with urllib.request.urlopen(f"{record.api}/health", timeout=2) as answer:  # noqa: S310 - our own http URL
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def begin(home: Path = HOME, *, port: int | None = None, host: str = LOOPBACK) -> ServerRecord:
    """Start the server unless it runs already, without waiting for it.

    Raises:
        RefusedInput: `port` is taken by somebody else, or the running server has another one; or
            others could reach the server and it would ask for no password.
    """
    if not _is_private(host) and not os.environ.get(AUTH):
        raise RefusedInput(
            [f"--host: {host} can be reached by others: set {AUTH}=NAME:PASSWORD, or leave --host out"]
        )
    running = status(home)
    if running is not None:
        if port not in (None, running.port):
            raise RefusedInput(
                [f"--port: the server runs on port {running.port} already; stop it first with `make down`"]
            )
        return running
    chosen = _free_port() if port is None else _checked_port(port)
    pid = spawn(
        [
            *(sys.executable, "-m", "prefect", "server", "start"),
            *("--host", host, "--port", str(chosen)),
        ],
        environment={
            **{key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"},
            "PREFECT_HOME": str((home / "prefect").absolute()),
            # Else the UI asks port 4200, whoever listens there; this way it asks where it was loaded from.
            "PREFECT_UI_API_URL": "/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "PREFECT_SERVER_SERVICES_DB_VACUUM_ENABLED": "events,flow_runs",
            "PREFECT_CLI_PROMPT": "false",
        },
        log=home / "prefect-server.log",
    )
    process = identify(pid)
    if process is None:
        raise ServerFailed(f"the Prefect server ended at once; see {home / 'prefect-server.log'}")
    record = ServerRecord(process=process, port=chosen, host=host)
    draft = _record(home).with_suffix(".draft")
    draft.write_bytes(encode(record))
    draft.replace(_record(home))
    return record


def wait_healthy(record: ServerRecord, home: Path = HOME) -> None:
    """Return as soon as the server answers.

    Raises:
        ServerFailed: It ended, or did not answer within two minutes.
    """
    deadline = time.monotonic() + START_DEADLINE_S
    while not is_healthy(record):
        # Waiting for its end is a pause that a dead server cuts short.
        if not wait_ended([record.process], 0.1):
            raise ServerFailed(f"the Prefect server ended; see {home / 'prefect-server.log'}")
        if time.monotonic() > deadline:
            raise ServerFailed(
                f"the Prefect server did not answer within {START_DEADLINE_S:.0f} s; "
                f"see {home / 'prefect-server.log'}"
            )


def stop(home: Path = HOME) -> ServerRecord | None:
    """End the server; return which one it was, or None if none ran."""
    record = status(home)
    if record is not None:
        end([record.process], grace_s=10)
    _record(home).unlink(missing_ok=True)
    return record


def client_environment(record: ServerRecord, home: Path = HOME) -> dict[str, str]:
    """Return the environment in which Prefect's client talks to this server."""
    environment = {
        **os.environ,
        "PREFECT_API_URL": record.api,
        "PREFECT_HOME": str((home / "prefect").absolute()),
        "PREFECT_CLI_PROMPT": "false",
    }
    if AUTH in os.environ:
        environment.setdefault(CLIENT_AUTH, os.environ[AUTH])
    return environment


def _is_private(host: str) -> bool:
    return host in (LOOPBACK, "localhost", "::1")


def _record(home: Path) -> Path:
    return home / "prefect-server.json"


def _free_port() -> int:
    for port in range(FIRST_PORT, FIRST_PORT + 100):
        if _is_free(port):
            return port
    raise ServerFailed(f"no free port between {FIRST_PORT} and {FIRST_PORT + 99} for the Prefect server")


def _checked_port(port: int) -> int:
    if not 1024 <= port <= 65535:
        raise RefusedInput([f"--port: {port} is not allowed; choose 1024 to 65535"])
    if not _is_free(port):
        raise RefusedInput([f"--port: port {port} is in use by another program; choose another one"])
    return port


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True
