"""The agent's log: one line an event, key=value, always with run, node and generation."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from elastic_core.output import lossy


class LogSource(Protocol):
    """Who knows the node's present id and generation."""

    @property
    def node_id(self) -> str:
        """The node's id, "" before there is one."""
        ...

    @property
    def generation(self) -> int:
        """The newest generation acted on."""
        ...


@dataclass(slots=True)
class LogContext:
    """What every line carries."""

    run: str
    node: str
    source: LogSource | None = None

    def stamp(
        self, _logger: object, _method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        """Add run, node and generation, and leave out what has no value."""
        source = self.source
        stamped = {
            **event,
            "run": self.run,
            "node": (source.node_id if source else "") or self.node,
            "generation": event.get("generation", source.generation if source else 0),
        }
        return {key: value for key, value in stamped.items() if value is not None}


def set_up_logs(context: LogContext, *, verbose: bool = False) -> None:
    """Send log lines to stderr, where torchrun's are, too; workers own stdout.

    From now on nothing fails for what this process writes to stderr.
    """
    sys.stderr = lossy(sys.stderr)
    structlog.configure(
        processors=[
            context.stamp,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger("debug" if verbose else "info"),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=False,
    )
