"""A node provider in memory, whose faults a test arranges."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic_core.cluster.provider import (
    Instance,
    InstanceState,
    InterruptionNotice,
    LaunchRequest,
    LaunchResult,
)
from elastic_core.errors import ProviderError
from elastic_core.ids import RunId


class FakeProvider:
    """Nodes that exist in memory only; passes the providers' contract suite.

    Attributes:
        capacity: Running nodes that it grants at most; less than asked is a shortfall.
        faults: Errors that the next calls raise, first one first.
        requests: Every launch request, for a test's assertions.
    """

    def __init__(self, *, capacity: int = 1_000) -> None:
        self.capacity = capacity
        self.faults: list[ProviderError] = []
        self.requests: list[LaunchRequest] = []
        self._instances: dict[RunId, dict[str, Instance]] = {}
        self._tokens: dict[tuple[RunId, str], list[str]] = {}
        self._notices: dict[RunId, list[InterruptionNotice]] = {}

    def launch(self, request: LaunchRequest) -> LaunchResult:
        """Make nodes up to the capacity; a known token returns its nodes as they are now."""
        self._fail_if_arranged()
        self.requests.append(request)
        instances = self._instances.setdefault(request.run, {})
        names = self._tokens.setdefault((request.run, request.token), [])
        running = sum(instance.state is InstanceState.RUNNING for instance in instances.values())
        granted = min(request.count - len(names), max(self.capacity - running, 0))
        for _ in range(granted):
            name = f"node-{len(instances) + 1}"
            instances[name] = Instance(name=name, state=InstanceState.RUNNING, address="127.0.0.1")
            names.append(name)
        shortfall = request.count - len(names)
        return LaunchResult(
            launched=tuple(instances[name] for name in names),
            shortfall=shortfall,
            reason=f"capacity is {self.capacity} nodes" if shortfall else "",
        )

    def terminate(self, run: RunId, names: Collection[str]) -> None:
        """End nodes at once."""
        self._fail_if_arranged()
        for name in names:
            if self._instances.get(run, {}).get(name, _GONE).state is not InstanceState.ENDED:
                self.end(run, name, detail="ended on request")

    def list_nodes(self, run: RunId) -> Sequence[Instance]:
        """Return all nodes of a run."""
        self._fail_if_arranged()
        return tuple(self._instances.get(run, {}).values())

    def interruptions(self, run: RunId) -> Sequence[InterruptionNotice]:
        """Return the notices that `notify` left."""
        self._fail_if_arranged()
        return self._notices.pop(run, [])

    def teardown(self, run: RunId) -> None:
        """End all nodes of a run."""
        self.terminate(run, list(self._instances.get(run, {})))

    # ---- what a test arranges ----------------------------------------------------------------

    def end(self, run: RunId, name: str, *, exit_code: int | None = None, detail: str = "") -> None:
        """Let a node end by itself."""
        instances = self._instances[run]
        instances[name] = replace(
            instances[name], state=InstanceState.ENDED, exit_code=exit_code, detail=detail
        )

    def notify(self, run: RunId, notice: InterruptionNotice) -> None:
        """Let the next `interruptions` return a notice."""
        self._notices.setdefault(run, []).append(notice)

    def _fail_if_arranged(self) -> None:
        if self.faults:
            raise self.faults.pop(0)


_GONE = Instance(name="gone", state=InstanceState.ENDED)
