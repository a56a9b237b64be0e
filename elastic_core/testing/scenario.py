"""Scenarios as text: what a coordinator is told, line by line, and all that it does about it.

    policy min=2 max=4 last_call=5
    t=0    seen a
    t=1    seen b
    t=6    tick

`play` returns the same lines with every reaction below the line that caused it. The
golden traces of the test suite are such files, and so is the protocol's documentation.

Events: `seen NODE [phase=ready gen=0 broken=0 failed=0 slots=1 step=0]` (a node keeps what is
not said), `gone NODE`, `answered NODE`, `target N`, `stop REASON`, `failure NODE [gen= exit=1 step=
started=yes consequence=no] MESSAGE`, `enter` (all members act on the current generation), `tick`,
`takeover` (another node rebuilds the coordinator from the store), `committed`, `refused` and
`applied` (no answer came, but the write had happened). Commits succeed by themselves unless the
policy line says `commits=manual`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from elastic_core.ids import LeaseId, NodeId, Revision
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Generation, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry
from elastic_core.rendezvous.coordinator import Coordinator
from elastic_core.rendezvous.events import (
    CloseRun,
    CommitFailed,
    CommitSucceeded,
    CoordinatorCommand,
    CoordinatorEvent,
    CoordinatorPolicy,
    FailureReported,
    FenceNode,
    NodeAnswered,
    NodeGone,
    NodeSeen,
    ProbeNodes,
    PublishGeneration,
    StopRequested,
    StoreView,
    TargetChanged,
    TimeAdvanced,
    Wait,
    WakeAt,
)

_POLICY = {
    "min": "min_nodes",
    "max": "max_nodes",
    "last_call": "last_call",
    "join": "join_timeout",
    "probe": "probe_timeout",
    "restarts": "max_restarts",
    "no_progress": "no_progress_limit",
    "stop": "stop_timeout",
    "partial_exit": "partial_exit",
    "changes": "changes_per_hour",
}
_WHOLE = frozenset({"min_nodes", "max_nodes", "max_restarts", "no_progress_limit", "changes_per_hour"})
_RECORD = {"gen": "generation", "broken": "broken", "failed": "failed", "slots": "slots", "step": "step"}

DEFAULT_POLICY = CoordinatorPolicy(
    min_nodes=1, max_nodes=4, last_call=5.0, join_timeout=60.0, probe_timeout=0.3, max_restarts=3
)


def make_record(node_id: str, number: int = 1) -> NodeRecord:
    """Return the record of a ready node with one slot; `number` tells its ports and lease apart."""
    return NodeRecord(
        node_id=NodeId(node_id),
        address=f"10.0.0.{number}",
        probe_port=9_000 + number,
        probe_token="token",  # noqa: S106  # no secret: fakes need one of any value
        master_port=20_000 + number,
        slots=1,
        lease=LeaseId(100 + number),
        phase=NodePhase.READY,
    )


class Scenario:
    """A coordinator with the store that it believes in, told one event after another.

    Attributes:
        commands: All that the coordinator asked for, in order.
        view: What the store holds.
    """

    def __init__(
        self,
        policy: CoordinatorPolicy = DEFAULT_POLICY,
        view: StoreView | None = None,
        *,
        manual: bool = False,
    ) -> None:
        self.policy = policy
        self.commands: list[CoordinatorCommand] = []
        self.now = 0.0
        self._manual = manual
        self._view = view or StoreView()
        self._nodes = {record.node_id: record for record in self._view.nodes}
        self._joined = dict(self._view.joined)
        self._revision = max([self._view.current_revision, *self._joined.values()])
        self._pending: PublishGeneration | None = None
        self.coordinator = Coordinator(policy, self.view, self.now)

    @property
    def view(self) -> StoreView:
        """What a reader of the store sees now."""
        return replace(self._view, nodes=tuple(self._nodes.values()), joined=tuple(self._joined.items()))

    @property
    def generation(self) -> Generation | None:
        """The generation in force."""
        return self._view.current

    @property
    def members(self) -> tuple[str, ...]:
        """Members of the generation in force, by rank."""
        return tuple(member.node_id for member in self._view.history.members) if self._view.history else ()

    @property
    def closed(self) -> Closed | None:
        """How the run ended."""
        return self._view.closed

    def tell(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Deliver an event as it is; commits that follow succeed at once unless they are manual."""
        answer = self.coordinator.handle(event, self.now)
        self.commands += answer
        reaction = list(answer)
        for command in answer:
            if isinstance(command, PublishGeneration):
                self._pending = command
                reaction += [] if self._manual else self.commit()
            elif isinstance(command, CloseRun) and not self._manual:
                self._view = replace(self._view, closed=command.closed)
        return reaction

    # ---- the store's facts -------------------------------------------------------------------

    def seen(self, node_id: str, **changes: object) -> list[CoordinatorCommand]:
        """A node writes its record; a new one is ready, a known one keeps what is not said."""
        name = NodeId(node_id)
        self._revision = Revision(self._revision + 1)
        record = self._nodes.get(name)
        if record is None:
            self._joined[name] = self._revision
            record = make_record(node_id, self._revision)
        self._nodes[name] = replace(record, **changes)  # type: ignore[arg-type]
        return self.tell(NodeSeen(record=self._nodes[name], joined=self._joined[name]))

    def gone(self, node_id: str) -> list[CoordinatorCommand]:
        """A node's key ends."""
        name = NodeId(node_id)
        self._nodes.pop(name, None)
        self._joined.pop(name, None)
        return self.tell(NodeGone(node_id=name))

    def answered(self, node_id: str) -> list[CoordinatorCommand]:
        """A probed node answers."""
        return self.tell(NodeAnswered(node_id=NodeId(node_id)))

    def target(self, nodes: int, *, least: int = 0) -> list[CoordinatorCommand]:
        """The flow wants so many nodes, and no generation of fewer than `least`."""
        self._view = replace(self._view, target=Target(nodes=nodes, least=least))
        return self.tell(TargetChanged(target=self._view.target))

    def stop(self, reason: str) -> list[CoordinatorCommand]:
        """Someone asks the run to stop."""
        self._view = replace(self._view, stop_reason=reason)
        return self.tell(StopRequested(reason=reason))

    def failure(self, failure: Failure) -> list[CoordinatorCommand]:
        """A node writes down its failure."""
        self._view = replace(self._view, failures=(*self._view.failures, failure))
        return self.tell(FailureReported(failure=failure))

    def enter(self) -> list[CoordinatorCommand]:
        """All living members act on the current generation."""
        number = self.generation.number if self.generation else 0
        commands: list[CoordinatorCommand] = []
        for name in self.members:
            if NodeId(name) in self._nodes:
                commands += self.seen(name, generation=number)
        return commands

    # ---- the coordinator's own life ----------------------------------------------------------

    def tick(self) -> list[CoordinatorCommand]:
        """The timer rings."""
        return self.tell(TimeAdvanced())

    def commit(self) -> list[CoordinatorCommand]:
        """The write in flight succeeds."""
        command = self._apply_commit()
        return self.tell(CommitSucceeded(number=command.generation.number, revision=self._revision))

    def refuse(self) -> list[CoordinatorCommand]:
        """The write in flight does not happen."""
        self._pending = None
        return self.tell(CommitFailed(view=self.view))

    def apply_unanswered(self) -> list[CoordinatorCommand]:
        """The write in flight happens, but its answer is lost."""
        self._apply_commit()
        return self.tell(CommitFailed(view=self.view))

    def take_over(self) -> list[CoordinatorCommand]:
        """Another node leads: nothing is left of the old coordinator's memory."""
        self._pending = None
        self.coordinator = Coordinator(self.policy, self.view, self.now)
        return self.tick()

    def _apply_commit(self) -> PublishGeneration:
        command = self._pending
        if command is None:
            raise ValueError("no generation is being written")
        self._pending = None
        self._revision = Revision(self._revision + 1)
        self._view = replace(
            self._view,
            current=command.generation,
            current_revision=self._revision,
            history=command.entry,
        )
        return command


# ---- text ------------------------------------------------------------------------------------


def play(text: str) -> str:
    """Return the scenario with all reactions; reactions that it already holds are ignored.

    Raises:
        ValueError: A line is no event, with its number.
    """
    scenario: Scenario | None = None
    shown: list[str] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("    ") or (scenario is not None and not line.strip()):
            continue
        if line.startswith("#") or not line.strip():
            shown.append(line)
        elif line.startswith("policy"):
            shown.append(line)
            scenario = _start(line)
        else:
            if scenario is None:
                raise ValueError(f"line {number}: the policy line must come first")
            shown.append(line)
            shown += _react(scenario, line, number)
    return "\n".join(shown) + "\n"


def _start(line: str) -> Scenario:
    options = dict(word.split("=", 1) for word in line.split()[1:])
    manual = options.pop("commits", "auto") == "manual"
    changes = {
        _POLICY[key]: int(value) if _POLICY[key] in _WHOLE else float(value) for key, value in options.items()
    }
    return Scenario(replace(DEFAULT_POLICY, **changes), manual=manual)  # type: ignore[arg-type]


def _react(scenario: Scenario, line: str, number: int) -> Iterable[str]:
    clock, _, rest = line.partition(" ")
    verb, _, arguments = rest.strip().partition(" ")
    if not clock.startswith("t=") or verb not in _VERBS:
        raise ValueError(f"line {number}: {line!r} is no event; known: {', '.join(_VERBS)}")
    scenario.now = float(clock.removeprefix("t="))
    return [f"    -> {describe(command)}" for command in _VERBS[verb](scenario, arguments.strip())]


def _options(text: str) -> tuple[dict[str, str], str]:
    """Split leading `key=value` words from the rest."""
    options: dict[str, str] = {}
    words = text.split()
    while words and "=" in words[0]:
        key, value = words.pop(0).split("=", 1)
        options[key] = value
    return options, " ".join(words)


def _seen(scenario: Scenario, arguments: str) -> list[CoordinatorCommand]:
    name, _, rest = arguments.partition(" ")
    options, _ = _options(rest)
    changes: dict[str, object] = {_RECORD[key]: int(options[key]) for key in options if key != "phase"}
    if "phase" in options:
        changes["phase"] = NodePhase(options["phase"])
    return scenario.seen(name, **changes)


def _failure(scenario: Scenario, arguments: str) -> list[CoordinatorCommand]:
    name, _, rest = arguments.partition(" ")
    options, message = _options(rest)
    current = scenario.generation.number if scenario.generation else 0
    return scenario.failure(
        Failure(
            node_id=NodeId(name),
            generation=int(options.get("gen", current)),
            rank=int(options.get("rank", 0)),
            local_rank=0,
            exit_code=int(options.get("exit", 1)),
            message=message,
            step=int(options.get("step", -1)),
            started=options.get("started", "yes") == "yes",
            consequence=options.get("consequence", "no") == "yes",
        )
    )


_VERBS: Mapping[str, Callable[[Scenario, str], list[CoordinatorCommand]]] = {
    "seen": _seen,
    "gone": lambda scenario, name: scenario.gone(name),
    "answered": lambda scenario, name: scenario.answered(name),
    "target": lambda scenario, nodes: scenario.target(int(nodes)),
    "stop": lambda scenario, reason: scenario.stop(reason),
    "failure": _failure,
    "enter": lambda scenario, _: scenario.enter(),
    "tick": lambda scenario, _: scenario.tick(),
    "takeover": lambda scenario, _: scenario.take_over(),
    "committed": lambda scenario, _: scenario.commit(),
    "refused": lambda scenario, _: scenario.refuse(),
    "applied": lambda scenario, _: scenario.apply_unanswered(),
}


def describe(command: CoordinatorCommand) -> str:
    """Return a command as one line for people."""
    match command:
        case PublishGeneration(entry=entry):
            return _describe_entry(entry)
        case ProbeNodes(nodes=nodes):
            return f"probe {' '.join(nodes)}"
        case FenceNode(node_id=node_id, reason=reason):
            return f"fence {node_id} ({reason})"
        case CloseRun(closed=closed):
            return f"close {closed.outcome}, exit {closed.exit_code}: {closed.reason}"
        case WakeAt(at=at):
            return f"wake at {at:.6g}"
        case Wait(reason=reason):
            return f"wait: {reason}"


def _describe_entry(entry: HistoryEntry) -> str:
    generation = entry.generation
    members = " ".join(f"{member.node_id}:{member.first_rank}" for member in entry.members)
    lost = "".join(f"; without {node} ({how})" for node, how in entry.lost.items())
    return (
        f"publish {generation.number} [{generation.cause}] {members} world={generation.world_size} "
        f"restarts={generation.restart_count} at {generation.master_address}:{generation.master_port}: "
        f"{generation.reason}{lost}"
    )
