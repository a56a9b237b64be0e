"""The fork server as its agent sees it: a child process and the socket to it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from elastic_core.agent.channel import Peer
from elastic_core.agent.process import Entrypoint, Launch

_ONE_THREAD: Final = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Set to 1, so that no library has a pool of threads that a fork would break."""

_TAIL_BYTES: Final = 1 << 16


class ServerProcess:
    """A running fork server. To be made on the agent's main thread, on which its life hangs.

    Attributes:
        peer: The socket to it; `peer.closed` means that it is dying or dead.
        warmed: It said that it is warm; set by the owner.
        unfit: Why it said that this node cannot compute, "" if it did not.
    """

    def __init__(self, environment: Mapping[str, str], *, directory: str, log: Path | None) -> None:
        """Start the process.

        Raises:
            OSError: The system refuses it (too many processes, too long an environment).
        """
        self.warmed = False
        self.unfit = ""
        self._log = log
        self._verdict = ""
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = _start(theirs, environment, directory=directory, log=log)
            except OSError:
                ours.close()
                raise
        self.peer = Peer(ours)

    def set_up(
        self, *, entrypoint: Entrypoint, preload: tuple[str, ...], start_method: str, preflight: bool = False
    ) -> None:
        """Say what to warm, and whether to see what this node can do."""
        setup = {
            "entrypoint": asdict(entrypoint),
            "preload": preload,
            "start_method": start_method,
            "preflight": preflight,
        }
        self._request({"setup": setup})

    def launch(self, launch: Launch) -> None:
        """Have a worker started."""
        self._request({"launch": asdict(launch)})

    def signal(self, number: int, *, launch: int) -> None:
        """Have a worker's main process signalled."""
        self._request({"signal": launch, "number": number})

    def kill_worker(self, launch: int) -> None:
        """Have a worker and everything in its session killed."""
        self._request({"kill": launch})

    def reports(self) -> list[dict[str, Any]]:
        """Return what the server has reported of its workers and itself."""
        reports = [json.loads(line) for line in self.peer.read()]
        self.unfit = next((each["unfit"] for each in reports if "unfit" in each), self.unfit)
        return [each for each in reports if "unfit" not in each]

    def kill(self, verdict: str) -> None:
        """Kill the server, for which `end` will give this reason; the kernel then kills its workers."""
        self._verdict = verdict
        self._process.kill()

    def end(self, timeout_s: float) -> str:
        """Let the server end everything, kill it if that takes too long, and return how it ended."""
        self.peer.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)
        self._process.kill()
        code = self._process.wait()
        if self._verdict:
            return self._verdict
        if code < 0:
            return f"was killed by signal {-code}"
        said = tail(self._log, 3) if self._log and code else ""
        return f"ended with code {code}" + (f": {said}" if said else "")

    def _request(self, request: Mapping[str, Any]) -> None:
        self.peer.write(json.dumps(request).encode() + b"\n")


def _start(
    connection: socket.socket, environment: Mapping[str, str], *, directory: str, log: Path | None
) -> subprocess.Popen[bytes]:
    name = "elastic_core.agent.forkserver"
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        return subprocess.Popen(
            [sys.executable, "-m", name, str(connection.fileno()), str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**environment, **dict.fromkeys(_ONE_THREAD, "1")},
            cwd=directory,
            pass_fds=[connection.fileno()],
            start_new_session=True,
        )


def tail(path: Path, lines: int) -> str:
    """Return the last lines of a file, reading only its end; "" if there is none."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(0, size - _TAIL_BYTES))
            text = stream.read().decode(errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-lines:])
