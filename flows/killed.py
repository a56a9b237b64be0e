"""Flow runs whose process was killed: it told nobody, and without help they would be `Running` for ever.

A flow notes itself in the directory of the run that it drives. Whoever looks after runs later tells the
server, of processes that are gone for certain only. A state in which a flow run has ended is never changed:
a rule that guesses from missing heartbeats does that to healthy and to finished ones.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State, StateType
from prefect.context import FlowRunContext
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.states import Cancelled, Crashed

from elastic_core.model.codec import decode, encode
from tasks.process import ProcessIdentity, identify, is_running
from tasks.runs import AlreadyRunning, RunDirectory, all_runs, job_lock

FILE: Final = "flow.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The flow that drives a run, or did.

    Attributes:
        host: Where its process runs: a pid says nothing elsewhere.
    """

    flow_run: str
    host: str
    process: ProcessIdentity

    def is_gone(self) -> bool:
        """Return whether the process has ended, as far as this machine can tell."""
        return self.host == socket.gethostname() and not is_running(self.process)


def note_driver(directory: RunDirectory) -> None:
    """Note that this process drives the run; the one before, whose job's lock we hold, is over."""
    context, process = FlowRunContext.get(), identify(os.getpid())
    if context is None or context.flow_run is None or process is None:
        return
    tell_of(directory)
    driver = Driver(flow_run=str(context.flow_run.id), host=socket.gethostname(), process=process)
    (directory.path / FILE).write_bytes(encode(driver))


def tell_killed(runs: Path) -> tuple[str, ...]:
    """Tell the server of each flow run that was killed; return a sentence each."""
    return tuple(_told(runs))


def tell_of(directory: RunDirectory) -> str:
    """Tell the server how the run's last flow ended, if that was killed; return it as a sentence, or ""."""
    file = directory.path / FILE
    try:
        driver = decode(Driver, file.read_bytes())
        if not driver.is_gone():
            return ""
        with get_client(sync_client=True) as client:
            told = _tell(client, UUID(driver.flow_run), f"its process {driver.process.pid} was killed")
    except (FileNotFoundError, ValueError):
        return ""
    except (httpx.HTTPError, PrefectException):
        return ""  # the server is away: the next one tells it
    file.unlink()
    return f"{directory.run}: {told}" if told else ""


def _told(runs: Path) -> Iterator[str]:
    for directory in all_runs(runs):
        if not (directory.path / FILE).exists():
            continue
        try:
            with job_lock(runs, directory.job().name):
                told = tell_of(directory)
        except AlreadyRunning:
            continue
        if told:
            yield told


def _tell(client: SyncPrefectClient, flow_run: UUID, why: str) -> str:
    """Read after the process was seen to be gone, the state is the last that it has told."""
    try:
        state = client.read_flow_run(flow_run).state
    except ObjectNotFound:
        return ""
    if state is None or state.is_final():
        return ""
    is_cancelled = state.type is StateType.CANCELLING
    new: State[Any] = Cancelled(message=why) if is_cancelled else Crashed(message=why)
    client.set_flow_run_state(flow_run, new)
    return f"flow run {flow_run} is {new.name}: {why}"
