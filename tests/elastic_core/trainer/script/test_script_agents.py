"""A plain loop with three lines under real agents: nodes come and go, and each sample is used once."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic_core.model.membership import Cause, Outcome
from elastic_core.store.etcd import EtcdStore
from elastic_core.testing.agents import AgentProcess, AgentRun
from tests.elastic_core.agent.node import wait_until
from tests.elastic_core.trainer.script.loop import SCRIPT, STEPS, Loop, assert_same_weights, audit_of

NUMBERS = itertools.count(1)


class LoopRun(AgentRun):
    """A run of the script."""

    def __init__(self, store: EtcdStore, endpoint: str, directory: Path) -> None:
        super().__init__(store, endpoint, f"loop-{next(NUMBERS)}-{int(time.time())}", directory)
        self.run_dir = directory / "run"
        self.run_dir.mkdir()

    def node(self, name: str, *, last_call_s: int = 0) -> AgentProcess:
        waits = f"lease_ttl=2,last_call_timeout={last_call_s},join_timeout=60"
        known = ["--nnodes=1:2", f"--rdzv-conf={waits}", f"--run-dir={self.run_dir}"]
        warm = "--preload=elastic_core.trainer.elastic"
        return self.start(name, *known, warm, str(SCRIPT), str(self.directory))

    def hold(self, step: int) -> Path:
        """Keep all workers in front of a step until the returned file is removed."""
        path = self.directory / f"hold-{step}"
        path.touch()
        return path

    def wait_committed(self, step: int) -> None:
        """Wait until some worker has finished a step."""
        files = self.run_dir / "samples"
        wait_until(
            lambda: any(f'"c":{step}}}' in path.read_text() for path in files.glob("*.jsonl")),
            f"step {step} is committed",
        )

    def sources(self) -> list[tuple[int, str]]:
        """Where each generation went on, and from what, as rank 0's node wrote it."""
        found = {}
        for path in (self.run_dir / "samples").glob("*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                if "from" in line:
                    found[line["g"]] = (line["from"], line["source"])
        return [found[number] for number in sorted(found)]


@pytest.fixture
def run(store: EtcdStore, etcd_endpoint: str, tmp_path: Path) -> Iterator[LoopRun]:
    with LoopRun(store, etcd_endpoint, tmp_path) as run:
        yield run


@pytest.mark.slow
def test_a_node_killed_in_mid_epoch_costs_a_script_no_sample_and_no_step(
    run: LoopRun, undisturbed: dict[str, torch.Tensor]
) -> None:
    hold = run.hold(10)
    agents = [run.node(name, last_call_s=100) for name in "ab"]
    run.wait_committed(9)
    entry = run.facts().history[1]
    assert entry.generation.world_size == 2
    victim = next(agent for agent in agents if entry.members[0].node_id.startswith(f"{agent.name}."))
    victim.kill()
    hold.unlink()
    (survivor,) = [agent for agent in agents if agent is not victim]
    assert survivor.wait() == 0
    assert run.wait_closed().outcome is Outcome.SUCCEEDED
    step, source = run.sources()[-1]
    assert step >= 10
    assert source in ("memory", "checkpoint"), "the newest state is taken, wherever it lies"
    audit = audit_of(run.run_dir)
    assert (audit.is_exact, audit.steps, audit.steps_lost) == (True, STEPS, 0)
    assert_same_weights(run.directory, undisturbed)
    facts = run.facts()
    assert facts.history[max(facts.history)].generation.cause is Cause.LOSS
    assert facts.progress is not None
    assert (facts.progress.step, facts.progress.samples) == (STEPS, 150)


@pytest.mark.case("G05")
@pytest.mark.slow
def test_a_join_in_mid_epoch_and_a_stop_cost_a_script_nothing_and_it_goes_on_alone(
    run: LoopRun, undisturbed: dict[str, torch.Tensor]
) -> None:
    holds = [run.hold(3), run.hold(12)]
    first = run.node("a")
    run.wait_committed(2)
    second = run.node("b")
    entry = run.wait_for(lambda facts: facts.history.get(2), "both are to train")
    assert entry.generation.cause is Cause.JOIN
    holds[0].unlink()
    run.wait_committed(11)
    run.request_stop()
    wait_until(lambda: "stopping" in first.output(), "the stop is known")
    holds[1].unlink()
    assert [first.wait(), second.wait()] == [75, 75]
    assert [source for _, source in run.sources()] == ["fresh", "memory"]
    alone = Loop(run.directory)
    again = alone.start(ELASTIC_RUN_DIR=str(run.run_dir), ELASTIC_ATTEMPT="2")
    assert alone.finish(again) == [0], alone.log.read_text()
    audit = audit_of(run.run_dir)
    assert (audit.is_exact, audit.steps, audit.steps_lost) == (True, STEPS, 0)
    assert_same_weights(run.directory, undisturbed)
