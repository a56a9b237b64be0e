"""What a run tells of itself while it runs: the values of `progress`, `history/*`, `resumed/*`.

Times are wall-clock seconds of the node that wrote them. They feed reports and
pictures; no decision compares the clocks of two machines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_core.ids import NodeId
from elastic_core.model.membership import Generation, Member


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where training is, from rank 0, at most about once a second.

    Attributes:
        step: Finished optimizer steps of the whole job.
        samples: Finished training samples of the whole job.
        total_steps: Steps of the whole job, 0 if unknown.
        phase: "train", "evaluate", "checkpoint" or "done".
        metrics: The newest of loss, lr, accuracy, images_per_s…, by name.
        trouble: Why the last checkpoint was not written, "" if it was.
        durable_step: Finished steps that the newest checkpoint of this process holds; -1 before its first.
    """

    generation: int
    epoch: int
    step: int
    samples: int
    total_steps: int = 0
    phase: str = "train"
    metrics: Mapping[str, float] = field(default_factory=dict)
    trouble: str = ""
    durable_step: int = -1
    wall_time: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HistoryEntry:
    """One generation with its members, written in the transaction that publishes it.

    Attributes:
        lost: Nodes of the generation before that are not in this one, each with how it went:
            "lease ended", "silent for 0.3 s", "drained", "worker failed".
        detected_at: When the coordinator learned of the change that caused this generation.
        published_at: When it was published.
        step: Highest step that any node had reported by then.
        stalled: Generations in a row that failed without a step beyond the one before.
    """

    generation: Generation
    members: tuple[Member, ...]
    lost: Mapping[NodeId, str] = field(default_factory=dict)
    detected_at: float = 0.0
    published_at: float = 0.0
    step: int = 0
    stalled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a generation came to its first step, from its rank 0 (times of that node).

    Attributes:
        last_step_at: End of the last step before the change; 0 if there was none.
        noticed_at: The worker noticed the change (broken collective or boundary); 0 if it is new.
        assigned_at: The worker got its assignment.
        formed_at: The process group stood.
        synced_at: State was the same on all ranks.
        first_step_at: End of the first step of this generation.
        step_before: Highest step finished by any member before; -1 if none.
        step_resumed: First step executed in this generation.
        source: Where the state came from: "fresh", "memory" or "checkpoint".
    """

    generation: int
    last_step_at: float
    noticed_at: float
    assigned_at: float
    formed_at: float
    synced_at: float
    first_step_at: float
    step_before: int
    step_resumed: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowWorker:
    """A worker that holds up the others; the value of `slow/{node_id}/{local_rank}`.

    Attributes:
        step: The step at which it was found, or found to have recovered.
        is_slow: Whether it still is, as far as it knows.
        ratio: Times as long as the others.
        seconds: Of its own work a step, without waiting for peers.
        others: The same of the middle one of the other nodes' workers.
        looks: Steps that it was judged by; very short ones are put together.
    """

    node_id: NodeId
    rank: int
    local_rank: int
    generation: int
    step: int
    is_slow: bool
    ratio: float
    seconds: float
    others: float
    looks: int
    wall_time: float = 0.0

    def headline(self) -> str:
        """Return the line that a person reads: who, how slow, and by what that is known."""
        who = f"rank {self.rank} on node {self.node_id}"
        evidence = f"{self.seconds:.3g} s of its own work a step, the others {self.others:.3g} s"
        by = f"{evidence}, over {self.looks} steps up to step {self.step}"
        if self.is_slow:
            return f"{who} is slow: {self.ratio:.1f} times as long as the others ({by})"
        return f"{who} is slow no more ({by})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """What a finished training hands over; the value of `result`, from rank 0.

    Attributes:
        metrics: Final figures by name, "test_accuracy" among them for classifiers.
        model: Path or URI of the exported model, "" if the script exports none.
    """

    epochs: int
    steps: int
    samples: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    model: str = ""
