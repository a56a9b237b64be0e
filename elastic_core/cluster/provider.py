"""Where nodes come from: the protocol that local processes, Docker and AWS fulfil.

A provider is eventually consistent: `list_nodes` is the truth, the memory of
what was asked is a hint, and every call may be repeated. Implementations live in
`tasks.providers`; one contract suite holds them all.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from elastic_core.ids import RunId


class InstanceState(StrEnum):
    """Life of an instance, as its provider tells it."""

    PENDING = "pending"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One machine, container or process group that runs (or ran) one agent.

    Attributes:
        name: The provider's name, unique for ever; the agent's node ids start with it.
        exit_code: What its agent ended with, if the provider knows.
        detail: Why it ended, in the provider's words ("out of memory", "spot interruption").
        log: Path or address of the agent's log.
    """

    name: str
    state: InstanceState
    address: str = ""
    exit_code: int | None = None
    detail: str = ""
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """Nodes to launch.

    Attributes:
        token: Makes the call idempotent: the same token never launches twice.
        command: The agent's command line after `elastic-agent`, passed on byte for byte.
        environment: Additional environment of the agent; never secrets.
    """

    run: RunId
    token: str
    count: int
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchResult:
    """What came of a launch; partial success is data, not an exception."""

    launched: tuple[Instance, ...]
    shortfall: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class InterruptionNotice:
    """The provider will take an instance away.

    Attributes:
        deadline: Wall-clock seconds since the epoch at which it goes.
    """

    instance: str
    deadline: float
    reason: str


class NodeProvider(Protocol):
    """Launch, list and terminate the nodes of runs.

    Raises (every method):
        ProviderError: The subclass says what the caller should do.
    """

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Launch nodes; with a token that was used before, return what it launched then."""
        ...

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """End instances, gracefully at first; ending one that is gone already succeeds."""
        ...

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return every instance of a run that the provider knows, also ended ones."""
        ...

    def interruptions(self, run: RunId) -> Sequence[InterruptionNotice]:
        """Return notices that have not been returned before."""
        ...

    def teardown(self, run: RunId) -> None:
        """End everything of a run and leave nothing behind; may be repeated."""
        ...
