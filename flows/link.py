"""The flow's side thread for the Prefect API: the only code that talks to it while a run goes on.

An API call inside the watch loop would block it for a minute in an outage. Here
the newest picture of the run wins, older ones are dropped, and an outage costs
nothing but freshness. The thread also reads the state of its own flow run, so
that the loop can fence itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.objects import StateType
from prefect.exceptions import PrefectException

STATE_PERIOD_S: Final = 2.0
ARTIFACT_PERIOD_S: Final = 30.0
"""The UI reads again every 30 s; writing more often would be waste."""
CALL_DEADLINE_S: Final = 5.0
CLOSE_DEADLINE_S: Final = 15.0

INPUT_PREFIX: Final = "rescaleinput-auto"
"""Keys of what `flows.rescale.RescaleInput.send_to` sends: Prefect makes them of the class's name."""

_GOING_ON: Final = frozenset({StateType.RUNNING, StateType.PENDING, StateType.SCHEDULED, StateType.PAUSED})
_STOPPING: Final = frozenset({StateType.CANCELLING, StateType.CANCELLED})


@dataclass(frozen=True, slots=True)
class ArtifactContent:
    """What an artifact shows; a key has one row for ever, updated in place."""

    kind: str
    data: Any
    description: str = ""


Render = Callable[[], Mapping[str, ArtifactContent]]
"""Makes the artifacts of one moment; called in the link's thread, just before they are written."""


class PrefectLink:
    """Owns all API calls of one flow run; a context manager.

    Args:
        flow_run: The run that this process executes.
        wake: Called when the run's state says that the loop should look up.
    """

    def __init__(self, flow_run: UUID, wake: Callable[[], None]) -> None:
        self._flow_run = flow_run
        self._wake = wake
        self._lock = threading.Condition()
        self._newest: Render | None = None
        self._closing = False
        self._state: StateType = StateType.RUNNING
        self._trouble = ""
        self._artifacts: dict[str, UUID] = {}
        self._inputs: list[str] = []
        self._thread = threading.Thread(target=self._work, name="prefect-link", daemon=True)

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the newest picture once more and end the thread, within a deadline."""
        with self._lock:
            self._closing = True
            self._lock.notify_all()
        self._thread.join(CLOSE_DEADLINE_S)

    def show(self, render: Render) -> None:
        """Let the artifacts show this next; replaces what was not written yet."""
        with self._lock:
            self._newest = render

    def wants_stop(self) -> bool:
        """Return whether somebody cancelled the flow run."""
        return self._state in _STOPPING

    def is_foreign(self) -> bool:
        """Return whether the server holds the run for ended: this process must not act any more."""
        return self._state not in _GOING_ON | _STOPPING

    def trouble(self) -> str:
        """Return why the artifacts are not updated any more, "" while they are."""
        return self._trouble

    def take_inputs(self) -> list[str]:
        """Return what was sent to this flow run since the last call, as JSON."""
        with self._lock:
            taken, self._inputs = self._inputs, []
            return taken

    # ---- the thread --------------------------------------------------------------------------

    def _work(self) -> None:
        try:
            self._serve()
        except Exception as error:  # a fault in a picture must not end a training, nor pass unseen
            self._trouble = f"{type(error).__name__}: {error}"
            self._wake()

    def _serve(self) -> None:
        with get_client(sync_client=True, httpx_settings={"timeout": CALL_DEADLINE_S}) as client:
            written_at = float("-inf")
            while not self._closing:
                self._read_state(client)
                self._read_inputs(client)
                if time.monotonic() - written_at >= ARTIFACT_PERIOD_S and self._write(client):
                    written_at = time.monotonic()
                with self._lock:
                    self._lock.wait_for(lambda: self._closing, STATE_PERIOD_S)
            self._write(client)

    def _read_state(self, client: SyncPrefectClient) -> None:
        try:
            state = client.read_flow_run(self._flow_run).state
        except (httpx.HTTPError, PrefectException):
            return  # An outage changes nothing: the last known state holds.
        if state is not None and state.type is not self._state:
            self._state = state.type
            self._wake()

    def _read_inputs(self, client: SyncPrefectClient) -> None:
        """Take what was sent; deleted first, so that nothing is followed twice."""
        try:
            found = client.filter_flow_run_input(self._flow_run, INPUT_PREFIX, limit=10, exclude_keys=set())
            for sent in found:
                client.delete_flow_run_input(self._flow_run, sent.key)
                with self._lock:
                    self._inputs.append(sent.value)
        except (httpx.HTTPError, PrefectException):
            return
        if found:
            self._wake()

    def _write(self, client: SyncPrefectClient) -> bool:
        """Write the newest picture; return whether it arrived. What failed is newest again."""
        with self._lock:
            render, self._newest = self._newest, None
        if render is None:
            return False
        try:
            for key, content in render().items():
                self._write_one(client, key, content)
        except (httpx.HTTPError, PrefectException):
            with self._lock:
                self._newest = self._newest or render
            return False
        return True

    def _write_one(self, client: SyncPrefectClient, key: str, content: ArtifactContent) -> None:
        if key in self._artifacts:
            update = ArtifactUpdate(data=content.data, description=content.description)
            client.update_artifact(self._artifacts[key], update)
            return
        created = client.create_artifact(
            ArtifactCreate(
                key=key,
                type=content.kind,
                data=content.data,
                description=content.description,
                flow_run_id=self._flow_run,
            )
        )
        self._artifacts[key] = created.id
