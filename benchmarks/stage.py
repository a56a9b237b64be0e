"""Where faults are played: a real etcd cluster, real agents with gloo workers, and what they wrote down.

One run lives through a whole play. Times are the training's own: rank 0 writes a
line for each step, of which the time, the generation and the world size count.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Self, TypeVar

from benchmarks.launchers import ROOT
from benchmarks.network import Network
from benchmarks.scripts.audited_steps import SAMPLES
from elastic_core.events.audit import SampleAudit, fold_audit
from elastic_core.events.lines import parse_lines
from elastic_core.model.progress import HistoryEntry
from elastic_core.store.etcd import EtcdStore
from elastic_core.testing.agents import AgentProcess, AgentRun
from elastic_core.testing.etcd_cluster import EtcdCluster

T = TypeVar("T")

HANG_S = 30.0
"""A training that has not come back by then hangs."""
START_S = 180.0
"""Longest wait for nodes to be set up: on a loaded machine imports take their time."""
TTL_S = 2.0
LEAST, MOST = 1, 5

_POLL_S = 0.01
_LAST_LINES = 12


class Hung(Exception):
    """Something did not come in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step, as rank 0 wrote it down."""

    at: float
    number: int
    generation: int
    world: int


class Stage:
    """A run with its store and its nodes; everything ends with it.

    Attributes:
        etcd: The store's members.
        run: The agents, and what the store says of them.
    """

    run: AgentRun
    store: EtcdStore

    def __init__(self, directory: Path, network: Network) -> None:
        self.network = network
        self.directory = directory
        self.etcd = EtcdCluster(directory / "etcd", host=network.host)
        self._shared = directory / "run"
        self._shared.mkdir()
        self._mark = f"STAGE={secrets.token_hex(8)}"
        self._stack = contextlib.ExitStack()
        self._number = 0

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.network)
            stack.enter_context(self.etcd)
            self.store = stack.enter_context(contextlib.closing(EtcdStore(self.etcd.endpoints)))
            name = f"faults-{secrets.token_hex(4)}"
            self.run = stack.enter_context(AgentRun(self.store, self.etcd.endpoints, name, self.directory))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # ---- nodes -------------------------------------------------------------------------------

    def add_node(self) -> str:
        """Start a node and return its name."""
        self._number += 1
        name = f"node-{self._number}"
        key, _, value = self._mark.partition("=")
        self.run.start(
            name,
            f"--nnodes={LEAST}:{MOST}",
            f"--rdzv-conf=lease_ttl={TTL_S},last_call_timeout=1,join_timeout={START_S},stop_grace=5",
            "--max-restarts=1000",
            "--worker-api=elastic",
            "--preload=elastic_core.testing.toy_trainee",
            "--preload=elastic_core.trainer.loop",
            f"--run-dir={self._shared}",
            *("-m", "benchmarks.scripts.audited_steps"),
            environment={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", key: value},
            within=self.network.attach(name),
        )
        return name

    def agent(self, name: str) -> AgentProcess:
        """Return a node's agent; `name` may be that of one of its incarnations."""
        stem = name.partition(".")[0]
        return next(agent for agent in self.run.agents.values() if agent.name == stem)

    def members(self) -> list[str]:
        """Return the members of the newest generation, in the order of their ranks."""
        history = self.run.facts().history
        return [member.node_id.partition(".")[0] for member in history[max(history)].members]

    def leader(self) -> str:
        """Return the node that coordinates."""
        return self.wait(lambda: self.run.facts().leader.partition(".")[0], "somebody coordinates", HANG_S)

    def generation(self) -> int:
        """Return the number of the newest generation."""
        return max(self.run.facts().history, default=0)

    def wait_entry(self, number: int, timeout_s: float = START_S) -> HistoryEntry:
        """Return a generation as soon as the store has it."""
        return self.wait(lambda: self.run.facts().history.get(number), f"generation {number}", timeout_s)

    # ---- steps -------------------------------------------------------------------------------

    def steps(self) -> list[Step]:
        """Return all steps in the order in which they were written."""
        try:
            text = (self._shared / "metrics.jsonl").read_text()
        except FileNotFoundError:
            return []
        return [
            Step(
                at=line["wall_time"],
                number=line["step"],
                generation=line["generation"],
                world=line["world_size"],
            )
            for line in map(json.loads, text.split("\n")[:-1])
            if "world_size" in line
        ]

    def wait_whole(self, world: int, *, since: float, after: int = 0, timeout_s: float) -> Step:
        """Return the first step after a time of the newest group, as soon as that has so many nodes.

        `after` is a generation that does not count any more.

        Raises:
            Hung: There was none in time.
        """

        def whole() -> Step | None:
            steps = [step for step in self.steps() if step.at > since]
            if not steps or steps[-1].world != world or steps[-1].generation <= after:
                return None
            return next(step for step in steps if step.generation == steps[-1].generation)

        return self.wait(whole, f"{world} nodes train", timeout_s)

    def wait(self, holds: Callable[[], T | None], what: str, timeout_s: float) -> T:
        """Return what `holds` returns as soon as that is true.

        Raises:
            Hung: Not in time.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := holds()):
            if time.monotonic() > deadline:
                raise Hung(f"not within {timeout_s:.0f} s: {what}")
            time.sleep(_POLL_S)
        return found

    # ---- the end -----------------------------------------------------------------------------

    def end(self) -> dict[str, int]:
        """Stop the run and return the exit codes of the nodes that trained.

        Raises:
            Hung: A node does not end.
        """
        running = {agent.name: agent for agent in self.run.agents.values() if agent.is_running}
        self.run.request_stop("the play is over")
        try:
            return {name: agent.wait(HANG_S) for name, agent in running.items()}
        except AssertionError as error:
            raise Hung(str(error)) from None

    def story(self) -> str:
        """Return the ends of what all nodes and their workers wrote."""
        logs = {agent.name: agent.log for agent in self.run.agents.values()}
        logs |= {
            f"{path.parent.name} worker": path for path in (self._shared / "logs").glob("*/worker-0.log")
        }
        return "\n".join(
            f"---- {name}: {line}"
            for name, log in sorted(logs.items())
            for line in log.read_text(errors="replace").splitlines()[-_LAST_LINES:]
        )

    def left_behind(self) -> list[str]:
        """Return what outlived the run: processes of its nodes, and keys that should be gone."""
        found = [f"process {pid}" for pid in self._marked()]
        for entry in self.store.read_prefix(self.run.keys.prefix).entries:
            key = entry.key.removeprefix(self.run.keys.prefix)
            if key.startswith("nodes/") or key == "leader":
                found.append(f"key {key}")
        return found

    def audit(self) -> SampleAudit:
        """Return what the model has seen."""
        files = sorted((self._shared / "samples").glob("*.jsonl"))
        return fold_audit(
            (list(parse_lines(path.read_text().splitlines())) for path in files),
            dataset=SAMPLES,
            is_finished=False,
        )

    def chronicle(self, audit: SampleAudit) -> str:
        """Return the generations in a line each, with the steps that each of them undid."""
        lines = []
        for number, entry in sorted(self.run.facts().history.items()):
            undone = audit.undone.get((1, number), 0)
            members = " ".join(member.node_id for member in entry.members)
            lost = f", lost {' '.join(entry.lost)}" if entry.lost else ""
            steps = f", {undone} steps again" if undone else ""
            lines.append(f"  {number} {entry.generation.cause}: {members}{lost}{steps}")
        return "\n".join(lines)

    def writers_out_of_turn(self) -> list[Step]:
        """Return the steps that a group made after one of a newer generation was made."""
        return [later for earlier, later in pairwise(self.steps()) if later.generation < earlier.generation]

    def _marked(self) -> list[int]:
        found = []
        for path in (process / "environ" for process in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if self._mark.encode() in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found


def longest_pause(steps: Sequence[Step], *, struck_at: float, until: float) -> float:
    """Return the longest time without a step from the last one before a fault on."""
    before = max((step.at for step in steps if step.at <= struck_at), default=struck_at)
    marks = [before, *(step.at for step in steps if struck_at < step.at <= until)]
    return max((later - earlier for earlier, later in pairwise(marks)), default=0.0)
