"""How a flow is heard, seen and steered: its log, its audience in the process, and the Prefect link."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from prefect.context import FlowRunContext
from prefect.logging import get_run_logger
from pydantic import ValidationError

from elastic_core.rescale.decision import Rescale
from flows.artifacts import artifacts_of
from flows.audience import RunSnapshot, audience
from flows.link import PrefectLink
from flows.metrics import RunMetrics
from flows.signals import StopSignals
from flows.telling import EventTeller, emit_to_prefect


class FlowSide:
    """The outside of one flow run; a context manager. Works without a server, then without its parts."""

    def __init__(self, signals: StopSignals, metrics: RunMetrics) -> None:
        self._signals = signals
        self._metrics = metrics
        context = FlowRunContext.get()
        flow_run = context.flow_run if context else None
        self._audience = audience()
        self._log = get_run_logger() if flow_run else logging.getLogger(__name__)
        self._wake: Callable[[], None] = lambda: None
        self._link = PrefectLink(flow_run.id, lambda: self._wake()) if flow_run else None
        self._teller = EventTeller(emit_to_prefect) if flow_run else None
        self._generation = 0
        self._told_trouble = False
        self._last: RunSnapshot | None = None

    def __enter__(self) -> Self:
        """Start the link to the server."""
        if self._link:
            self._link.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Bring the artifacts up to date and end the link."""
        if self._link:
            self._link.__exit__(kind, error, trace)

    def wake_with(self, wake: Callable[[], None]) -> None:
        """Let news from the server end the loop's wait by this call."""
        self._wake = wake

    def say(self, sentence: str) -> None:
        """Tell a decision: to the log, once, and to the audience."""
        self._log.info("%s", sentence)
        self._audience.decided(sentence)

    def show(self, snapshot: RunSnapshot) -> None:
        """Show the run."""
        self._tell_generation(snapshot)
        if self._teller:
            self._teller.tell(snapshot)
        self._audience.saw(snapshot)
        self._metrics.show(snapshot)
        self._last = snapshot
        if self._link:
            self._link.show(lambda: artifacts_of(snapshot))
            if self._link.trouble() and not self._told_trouble:
                self._told_trouble = True
                self._log.warning("artifacts are not updated any more: %s", self._link.trouble())

    def show_again(self) -> None:
        """Bring the artifacts up to date once more: the run's directory holds its report now."""
        last = self._last
        if self._link and last:
            self._link.show(lambda: artifacts_of(last))

    def stop_reason(self) -> str:
        """Return why somebody wants the run to stop: a signal, or the flow run was cancelled; else ""."""
        if self._link is not None and self._link.wants_stop():
            return "the flow run was cancelled"
        return self._signals.asked()

    def wishes(self) -> Sequence[Rescale]:
        """Return the rescales that were sent to this flow run since the last call."""
        sent = self._link.take_inputs() if self._link else []
        found = []
        for text in sent:
            try:
                found.append(Rescale.model_validate_json(text))
            except ValidationError as error:
                self.say(f"a rescale was refused: {error.errors()[0]['msg']}")
        return found

    def is_foreign(self) -> bool:
        """Return whether the server holds the run for ended."""
        return self._link is not None and self._link.is_foreign()

    def _tell_generation(self, snapshot: RunSnapshot) -> None:
        for entry in snapshot.observation.history:
            generation = entry.generation
            if generation.number > self._generation:
                self._generation = generation.number
                self.say(f"generation {generation.number}: {generation.reason}")
