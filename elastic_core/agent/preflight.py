"""Is this node fit to take part? What is looked at before it registers: the places that it writes to.

A directory of a network file system that died blocks whoever touches it, for ever. So the looks happen in
a child, which is waited for so long and no longer. Free of everything but the standard library, that
a look costs a few hundredths of a second. What the node computes with is looked at by
`elastic_core.agent.fitness`, where torch is.

    python -m elastic_core.agent.preflight NAME=DIRECTORY…
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from elastic_core.agent.address import INTERFACE, interfaces, unknown_interfaces

PATIENCE_S: Final = 20.0
"""All looks together; what takes longer is as good as broken."""
PROBE_BYTES: Final = 1 << 20
LEAST_FREE: Final = 64 << 20
"""Bytes that must be free: less is gone with the first checkpoint."""
SLOW_S: Final = 10.0
"""A mebibyte that takes so long to become durable would hold up every checkpoint."""
_MIB: Final = 1 << 20
_KILL_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """What one look found.

    Attributes:
        told: What is so, with its value.
        remedy: What to do about it; "": it is as it should be.
    """

    check: str
    told: str
    remedy: str = ""

    def sentence(self) -> str:
        """Return it in one line: the check, the value, the remedy."""
        return f"pre-flight check {self.check!r}: {self.told}" + (f"; {self.remedy}" if self.remedy else "")


def look_at_places(places: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> list[Finding]:
    """Return what is found at each place, by a child that may hang.

    Args:
        places: Directories by the name of their check; they are made if they are not there.
        patience_s: For all of them together.
    """
    command = [sys.executable, "-m", __name__, *(f"{name}={path}" for name, path in places.items())]
    return ask_child(command, patience_s=patience_s, checks=tuple(places), remedy=_HANGS)


_HANGS: Final = "see whether its file system answers (mount, network), or name another directory"


def ask_child(
    command: Sequence[str], *, patience_s: float, checks: Sequence[str], remedy: str
) -> list[Finding]:
    """Run a program that prints a finding a line; what it owes when the time is up is a finding, too.

    Args:
        command: The program and its arguments.
        patience_s: For all of them together.
        checks: Names of the findings, in their order.
        remedy: For the one that never came.
    """
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, complaint = child.communicate(timeout=patience_s)
        why = (complaint.strip().splitlines() or [f"ended with code {child.returncode}"])[-1]
    except subprocess.TimeoutExpired as error:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # who hangs in the kernel cannot be killed
            child.wait(_KILL_S)
        for pipe in (child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
        said, why = _text(error.stdout), f"no answer within {patience_s:g} s"
    return _complete(said, checks, why, remedy)


def _complete(said: str, checks: Sequence[str], why: str, remedy: str) -> list[Finding]:
    found = [Finding(**json.loads(line)) for line in said.splitlines() if line.startswith("{")]
    if len(found) < len(checks):
        found.append(Finding(checks[len(found)], why, remedy))
    return found


def _text(said: bytes | str | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def look_at_interface(names: str) -> Finding:
    """See whether gloo can use an interface's name; NCCL's patterns (`^lo,docker`) end it in every worker.

    Args:
        names: The value of `GLOO_SOCKET_IFNAME`, "" where nothing is said.
    """
    told = f"{INTERFACE} is {names!r}" if names else "the one that leads to the store"
    unknown = unknown_interfaces(names) if names else []
    if not unknown:
        return Finding("interface", told)
    remedy = f"{unknown[0]!r} is not here, and gloo takes names, no patterns: {', '.join(interfaces())}"
    return Finding("interface", told, remedy)


def look_at_place(check: str, path: Path) -> Finding:
    """Write, make durable, read back and remove a mebibyte, and see what is free."""
    probe, data = path / f".elastic-probe-{secrets.token_hex(6)}", secrets.token_bytes(PROBE_BYTES)
    try:
        path.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with probe.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        took = time.monotonic() - began
        is_there = probe.name in os.listdir(path) and probe.read_bytes() == data  # noqa: PTH208 (a name)
        free = shutil.disk_usage(path).free
    except OSError as error:
        remedy = "correct its permissions or mount, make room, or name another directory"
        return Finding(check, f"{path} cannot be written: {error.strerror or error}", remedy)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    told = f"{path}: 1 MiB durable in {took:.2f} s, {free // _MIB} MiB free"
    if not is_there:
        return Finding(check, f"{path} does not show what was just written there", _HANGS)
    if free < LEAST_FREE:
        return Finding(check, told, f"make room: at least {LEAST_FREE // _MIB} MiB must be free")
    if took > SLOW_S:
        return Finding(check, told, f"more than {SLOW_S:g} s is too slow for checkpoints: {_HANGS}")
    return Finding(check, told)


def tell(findings: Iterator[Finding]) -> None:
    """Print each as soon as it is there."""
    for finding in findings:
        print(json.dumps(asdict(finding)), flush=True)  # noqa: T201 (what the parent reads)


if __name__ == "__main__":
    pairs = [argument.partition("=") for argument in sys.argv[1:]]
    tell(look_at_place(name, Path(path)) for name, _, path in pairs)
