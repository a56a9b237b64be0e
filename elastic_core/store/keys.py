"""Every key of a run, in one place.

    /elastic/{run}/nodes/{node_id}             NodeRecord, on the node's lease; written by its agent
    /elastic/{run}/leader                      node id of the coordinator, on its lease
    /elastic/{run}/generations/{g}/{node_id}   Assignment; written by the coordinator
    /elastic/{run}/current                     Generation: readers act on this key only
    /elastic/{run}/owner                       the flow that drives the run, on its lease
    /elastic/{run}/target                      Target; written by the flow, or by a rescale
    /elastic/{run}/control/stop                Stop; written by the flow, or by an agent whose flow is gone
    /elastic/{run}/control/drain/{node_id}     a node to drain; written by the flow
    /elastic/{run}/closed                      Closed: the outcome
    /elastic/{run}/progress                    Progress, from rank 0
    /elastic/{run}/result                      RunResult, from rank 0
    /elastic/{run}/history/{g}                 HistoryEntry, written with `current`
    /elastic/{run}/resumed/{g}                 Resumption, from the generation's rank 0
    /elastic/{run}/failures/{g}/{node_id}      Failure, bounded in size
    /elastic/{run}/slow/{node_id}/{local_rank} SlowWorker, from the worker that found itself slow
    /elastic/{run}/recall                      torchrun only: number of the round whose members are due
    /elastic/{run}/rounds/{g}/                 torchrun only: what the agents of a round tell each other

A run's prefix ends with "/", so that run `train` never sees keys of `train2`.
Generation numbers are padded, so that keys sort as numbers do.
"""

from __future__ import annotations

from dataclasses import dataclass

from elastic_core.ids import NodeId, RunId, check_name

ROOT = "/elastic/"


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run."""

    run: RunId

    def __post_init__(self) -> None:
        check_name("run", self.run)

    @property
    def prefix(self) -> str:
        """Everything of this run."""
        return f"{ROOT}{self.run}/"

    @property
    def nodes(self) -> str:
        """Prefix of all node records."""
        return f"{self.prefix}nodes/"

    def node(self, node_id: NodeId) -> str:
        """The record of one node."""
        return f"{self.nodes}{node_id}"

    @property
    def leader(self) -> str:
        """Who coordinates."""
        return f"{self.prefix}leader"

    @property
    def current(self) -> str:
        """The generation in force."""
        return f"{self.prefix}current"

    @property
    def generations(self) -> str:
        """Prefix of all assignments."""
        return f"{self.prefix}generations/"

    def generation(self, number: int) -> str:
        """Prefix of one generation's assignments."""
        return f"{self.generations}{number:08d}/"

    def assignment(self, number: int, node_id: NodeId) -> str:
        """One node's assignment."""
        return f"{self.generation(number)}{node_id}"

    @property
    def owner(self) -> str:
        """Which flow drives the run; its creation revision is that flow's fencing token."""
        return f"{self.prefix}owner"

    @property
    def target(self) -> str:
        """What the flow wants."""
        return f"{self.prefix}target"

    @property
    def control(self) -> str:
        """Prefix of all requests to the agents."""
        return f"{self.prefix}control/"

    @property
    def stop(self) -> str:
        """The request to end at a boundary."""
        return f"{self.control}stop"

    def drain(self, node_id: NodeId) -> str:
        """The request to drain one node."""
        return f"{self.control}drain/{node_id}"

    @property
    def closed(self) -> str:
        """How the run ended."""
        return f"{self.prefix}closed"

    @property
    def progress(self) -> str:
        """Where training is."""
        return f"{self.prefix}progress"

    @property
    def result(self) -> str:
        """What training handed over."""
        return f"{self.prefix}result"

    @property
    def history(self) -> str:
        """Prefix of the generations' history."""
        return f"{self.prefix}history/"

    def history_entry(self, number: int) -> str:
        """The history of one generation."""
        return f"{self.history}{number:08d}"

    @property
    def resumptions(self) -> str:
        """Prefix of all resumptions."""
        return f"{self.prefix}resumed/"

    def resumption(self, number: int) -> str:
        """How one generation came to its first step."""
        return f"{self.resumptions}{number:08d}"

    @property
    def failures(self) -> str:
        """Prefix of all failures."""
        return f"{self.prefix}failures/"

    def failure(self, number: int, node_id: NodeId) -> str:
        """One node's failure in one generation."""
        return f"{self.failures}{number:08d}/{node_id}"

    @property
    def slow(self) -> str:
        """Prefix of all workers that hold up the others."""
        return f"{self.prefix}slow/"

    def slow_worker(self, node_id: NodeId, local_rank: int) -> str:
        """What one worker found of its own pace."""
        return f"{self.slow}{node_id}/{local_rank}"

    @property
    def recall(self) -> str:
        """Which round's members shall come back."""
        return f"{self.prefix}recall"

    @property
    def rounds(self) -> str:
        """Prefix of all rounds' stores."""
        return f"{self.prefix}rounds/"

    def round_store(self, number: int) -> str:
        """Prefix of one round's store."""
        return f"{self.rounds}{number:08d}/"
