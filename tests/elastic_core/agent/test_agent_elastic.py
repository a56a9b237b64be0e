"""Real agents on a real etcd; their workers speak the elastic API, without torch."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.progress import HistoryEntry
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.server import EtcdServer
from elastic_core.testing.agents import AgentProcess, AgentRun, descendants
from tests.elastic_core.agent.metadata_service import MetadataDouble
from tests.elastic_core.agent.node import is_alive, wait_until

STUB = Path(__file__).parents[2] / "scripts" / "elastic_stub.py"
NUMBERS = itertools.count(1)


class StubRun(AgentRun):
    """A run whose workers are stubs."""

    def __init__(self, store: EtcdStore, endpoint: str, directory: Path) -> None:
        super().__init__(store, endpoint, f"stub-{next(NUMBERS)}-{int(time.time())}", directory)
        self.store = store
        self.shared = directory / "shared"
        self.shared.mkdir()

    def step(self) -> int:
        """The step that rank 0 wrote down, without a look at the store."""
        return int((self.shared / "step").read_text() or "0")

    def node(self, name: str, nodes: str, *flags: str, steps: int = 10_000, conf: str = "") -> AgentProcess:
        waits = f"lease_ttl=2,last_call_timeout=1,join_timeout=30,{conf}"
        return self.start(
            name,
            f"--nnodes={nodes}",
            f"--rdzv-conf={waits}",
            "--worker-api=elastic",
            "--start-method=spawn",
            *flags,
            str(STUB),
            str(self.shared),
            f"--steps={steps}",
        )

    def wait_members(self, count: int) -> HistoryEntry:
        """Wait for a generation of so many nodes that all of them have entered."""
        return self.wait_for(
            lambda facts: next(
                (
                    entry
                    for number, entry in facts.history.items()
                    if len(entry.members) == count and facts.entered(number)
                ),
                None,
            ),
            f"{count} nodes train",
        )

    def agent_of(self, node_id: str) -> AgentProcess:
        return next(agent for agent in self.agents.values() if node_id.startswith(f"{agent.name}."))

    def notes(self, what: str) -> list[dict[str, Any]]:
        """What the workers wrote down of a kind, in no order."""
        lines = [line for path in self.shared.glob("*.jsonl") for line in path.read_text().splitlines()]
        return [note for note in map(json.loads, lines) if note["what"] == what]


@pytest.fixture
def run(store: EtcdStore, etcd_endpoint: str, tmp_path: Path) -> Iterator[StubRun]:
    with StubRun(store, etcd_endpoint, tmp_path) as run:
        yield run


def test_two_nodes_train_to_the_end_and_both_exit_with_zero(run: StubRun) -> None:
    first, second = run.node("a", "2", steps=50), run.node("b", "2", steps=50)
    assert (first.wait(), second.wait()) == (0, 0)
    assert run.wait_closed().outcome is Outcome.SUCCEEDED
    entry = run.facts().history[1]
    assert (entry.generation.cause, entry.generation.world_size) == (Cause.START, 2)
    assert {note["rank"] for note in run.notes("finished")} == {0, 1}
    assert run.facts().progress.step == 50  # type: ignore[union-attr]
    assert run.facts().nodes == {}


@pytest.mark.case("R21")
@pytest.mark.slow
def test_a_late_joiner_learns_the_outcome_and_starts_no_worker(run: StubRun) -> None:
    run.node("a", "1", steps=20).wait()
    late = run.node("b", "1", steps=20)
    assert late.wait() == 0
    assert "job finished at step 20" in late.output()
    assert "fork server" not in late.output()
    assert len(run.facts().history) == 1


@pytest.mark.case("R02")
def test_a_killed_node_is_lost_long_before_its_lease_ends_and_the_others_go_on(run: StubRun) -> None:
    for name in "ab":
        run.node(name, "1:2")
    before = run.wait_members(2)
    victim = before.members[1].node_id
    processes = descendants(run.agent_of(victim).pid)
    began = time.monotonic()
    run.agent_of(victim).kill()
    entry = run.wait_entered(before.generation.number + 1, 10)
    assert time.monotonic() - began < 1.5
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.LOSS, 0)
    assert list(entry.lost) == [victim]
    wait_until(lambda: not any(map(is_alive, processes)), "everything of the node is dead", 2.0)
    resumed = run.wait_for(lambda facts: facts.resumed.get(entry.generation.number), "it trains on")
    run.wait_step(resumed.step_resumed + 10)


@pytest.mark.slow
def test_a_killed_coordinator_is_replaced_and_its_node_lost(run: StubRun) -> None:
    for name in "abc":
        run.node(name, "1:3")
    before = run.wait_members(3)
    leader = run.facts().leader
    began = time.monotonic()
    run.agent_of(leader).kill()
    entry = run.wait_entered(before.generation.number + 1, 10)
    assert time.monotonic() - began < 1.5
    assert (entry.generation.cause, list(entry.lost)) == (Cause.LOSS, [leader])
    assert run.facts().leader not in ("", leader)


@pytest.mark.case("R03")
@pytest.mark.slow
def test_a_second_node_joins_a_running_one_without_a_restart(run: StubRun) -> None:
    first = run.node("a", "1:2")
    run.wait_step(20)
    second = run.node("b", "1:2")
    entry = run.wait_entered(2, 15)
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.JOIN, 0)
    assert [member.node_id[0] for member in entry.members] == ["a", "b"]
    resumed = run.wait_for(lambda facts: facts.resumed.get(2), "generation 2 trains")
    assert resumed.step_resumed == resumed.step_before + 1
    (run.shared / "enough").touch()
    assert (first.wait(), second.wait()) == (0, 0)
    assert len({note["pid"] for note in run.notes("entered") if note["rank"] == 0}) == 1


@pytest.mark.case("R01")
@pytest.mark.slow
def test_a_node_that_gets_sigterm_is_drained_and_loses_no_step(run: StubRun) -> None:
    for name in "ab":
        run.node(name, "1:2")
    before = run.wait_members(2)
    number = before.generation.number
    gone, stays = before.members[1].node_id, run.agent_of(before.members[0].node_id)
    leaver = run.agent_of(gone)
    leaver.signal(signal.SIGTERM)
    entry = run.wait_entered(number + 1, 10)
    assert [member.node_id for member in entry.members] == [before.members[0].node_id]
    assert leaver.wait(10) == 75
    assert gone not in run.facts().nodes, "it leaves by its own word, not by the end of its lease"
    assert entry.generation.cause is Cause.DRAIN
    assert list(entry.lost.values()) == ["drained"]
    resumed = run.wait_for(lambda facts: facts.resumed.get(number + 1), "it trains on")
    assert resumed.step_resumed == resumed.step_before + 1
    (run.shared / "enough").touch()
    assert stays.wait() == 0


@pytest.mark.case("G06")
@pytest.mark.slow
def test_a_spot_notice_drains_its_node_long_before_the_deadline_and_no_step_is_lost(
    run: StubRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with MetadataDouble(tmp_path, monkeypatch) as imds:
        stays = run.node("a", "1:2")
        run.wait_members(1)
        leaver = run.node("b", "1:2", "--notices=imds", f"--notices-endpoint={imds.endpoint}")
        before = run.wait_members(2)
        imds.interrupt(120)
        began = time.monotonic()
        assert leaver.wait() == 75
        assert time.monotonic() - began < 30, "well within the two minutes"
    entry = run.wait_entered(before.generation.number + 1)
    (fate,) = entry.lost.values()
    assert entry.generation.cause is Cause.DRAIN
    assert re.fullmatch(r"drained: spot interruption: terminate at \d\d:\d\d:\d\d UTC", fate)
    resumed = run.wait_for(lambda facts: facts.resumed.get(entry.generation.number), "it trains on")
    assert resumed.step_resumed == resumed.step_before + 1
    (run.shared / "enough").touch()
    assert stays.wait() == 0


@pytest.mark.slow
def test_nodes_whose_flow_is_gone_for_longer_than_declared_save_and_end(
    run: StubRun, store: EtcdStore
) -> None:
    lease = store.grant(2)
    flow = store.keep_alive(lease, 2)
    store.put(run.keys.owner, b"a flow", lease)
    nodes = [run.node(name, "2", conf="flow_timeout=1.5") for name in "ab"]
    run.wait_members(2)
    step = run.wait_step(1).step
    run.wait_step(step + 150)  # three seconds: twice the time, and the flow is there
    assert all(node.is_running for node in nodes)
    flow.close()
    store.revoke(lease)
    assert [node.wait() for node in nodes] == [75, 75]
    closed = run.wait_closed()
    assert (closed.outcome, closed.reason) == (
        Outcome.PREEMPTED,
        "stopped: no flow drove the run for 1.5 s",
    )
    assert run.step() > step, "the state was saved"


@pytest.mark.case("G08")
@pytest.mark.slow
def test_a_metadata_service_that_never_answers_stops_no_training(run: StubRun) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # takes connections, and says nothing
        flag = f"--notices-endpoint=http://127.0.0.1:{silent.getsockname()[1]}"
        node = run.node("a", "1", "--notices=imds", flag, steps=150)
        assert node.wait() == 0
    assert node.output().count("no spot notices") == 1
    assert run.wait_closed().outcome is Outcome.SUCCEEDED


@pytest.mark.case("R11")
@pytest.mark.slow
def test_a_node_beyond_the_maximum_stands_by_and_is_promoted(run: StubRun) -> None:
    for name in "ab":
        run.node(name, "1:2")
    number = run.wait_members(2).generation.number
    spare = run.node("c", "1:2")
    run.wait_for(lambda facts: facts.ready() == 3, "the spare is ready")
    assert {note["rank"] for note in run.notes("entered")} == {0, 1}
    wait_until(lambda: "standby" in spare.output(), "the spare says so", 5)
    began = time.monotonic()
    run.agents["a-0"].kill()
    entry = run.wait_for(lambda facts: facts.history.get(number + 1), "a generation", 10)
    if len(entry.members) == 1:
        entry = run.wait_for(lambda facts: facts.history.get(number + 2), "the promotion", 10)
    assert time.monotonic() - began < 2 + 5, "the lease's TTL and 5 s"
    assert {member.node_id[0] for member in entry.members} == {"b", "c"}


@pytest.mark.case("R11")
@pytest.mark.slow
def test_a_standby_takes_a_lost_node_s_place_in_the_very_next_generation(run: StubRun) -> None:
    run.request_target(2)
    for name in "abc":
        run.node(name, "1:4")
    before = run.wait_members(2)
    run.wait_for(lambda facts: facts.ready() == 3, "the standby is set up")
    victim = before.members[1].node_id
    (standby,) = set(run.facts().nodes) - {member.node_id for member in before.members}
    run.agent_of(victim).kill()
    entry = run.wait_entered(before.generation.number + 1, 10)
    assert [member.node_id for member in entry.members] == [before.members[0].node_id, standby]
    assert (entry.generation.cause, entry.generation.world_size) == (Cause.LOSS, 2)
    resumed = run.wait_for(lambda facts: facts.resumed.get(entry.generation.number), "it trains on")
    run.wait_step(resumed.step_resumed + 10)
    since = range(before.generation.number, entry.generation.number + 1)
    sizes = [run.facts().history[number].generation.world_size for number in since]
    assert sizes == [2, 2], "it never fell short"


@pytest.mark.slow
def test_a_failed_worker_spends_a_restart_and_names_the_root_cause(run: StubRun) -> None:
    agents = [run.node("a", "2", "--max-restarts=1"), run.node("b", "2", "--max-restarts=1")]
    run.wait_entered(1)
    run.wait_step(10)
    (run.shared / "fail-1").touch()
    entry = run.wait_entered(2)
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.FAILURE, 1)
    assert "ValueError: bad label 7 at stub.py:1" in entry.generation.reason
    run.wait_for(lambda facts: facts.progress and facts.progress.generation == 2, "it trains on")
    (run.shared / "fail-0").touch()
    assert [agent.wait() for agent in agents] == [3, 3]
    closed = run.wait_closed()
    assert closed.outcome is Outcome.FAILED
    assert "2 failures, budget 1" in closed.reason
    for agent in agents:
        assert any("ValueError: bad label 7 at stub.py:1" in line for line in agent.last_lines())


@pytest.mark.case("W06")
@pytest.mark.slow
def test_a_worker_that_hangs_is_named_with_its_stack_and_replaced_and_the_others_keep_their_state(
    run: StubRun,
) -> None:
    agents = {name: run.node(name, "2", "--max-restarts=2", conf="hang_timeout=1") for name in "ab"}
    run.wait_entered(1)
    run.wait_step(10)
    (run.shared / "hang-1").touch()
    entry = run.wait_entered(2)
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.FAILURE, 1)
    assert re.search(
        r"^rank 1 on node \S+: hung: no step for \d s at \S*elastic_stub\.py:\d+ after step \d+$",
        entry.generation.reason,
    )
    (failure,) = [failure for failure in run.facts().failures if not failure.consequence]
    assert 'elastic_stub.py", line' in failure.traceback
    assert " in compute" in failure.traceback.splitlines()[1]
    assert (failure.rank, failure.exit_code) == (1, 137)
    assert "its stacks:" in agents[str(failure.node_id)[0]].output()
    entered = run.notes("entered")
    assert len({note["pid"] for note in entered if note["rank"] == 0}) == 1, (
        "the survivor is the same process"
    )


@pytest.mark.case("W06")
@pytest.mark.slow
def test_a_worker_that_a_signal_stopped_is_found_and_replaced(run: StubRun) -> None:
    for name in "ab":
        run.node(name, "2", "--max-restarts=2", conf="hang_timeout=1")
    run.wait_entered(1)
    run.wait_step(10)
    (victim,) = [note["pid"] for note in run.notes("entered") if note["rank"] == 1]
    os.kill(victim, signal.SIGSTOP)
    entry = run.wait_entered(2)
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.FAILURE, 1)
    assert "hung, stopped by a signal: no step for" in entry.generation.reason
    assert not is_alive(victim)


@pytest.mark.case("G02")
@pytest.mark.slow
def test_the_only_node_that_gets_sigterm_saves_and_the_next_start_goes_on(run: StubRun) -> None:
    only = run.node("a", "1")
    run.wait_step(20)
    only.signal(signal.SIGTERM)
    assert only.wait(15) == 75
    (left,) = run.notes("left")
    assert left["saved"] is True
    assert run.facts().closed is None
    run.node("b", "1", steps=left["step"] + 20)
    run.wait_closed()
    assert {note["step"] for note in run.notes("entered")} == {0, left["step"]}


@pytest.mark.slow
def test_the_only_member_that_is_drained_saves_before_its_successor_begins(run: StubRun) -> None:
    leaver = run.node("a", "1:1")
    run.wait_step(20)
    run.node("b", "1:1")
    run.wait_for(lambda facts: facts.ready() == 2, "the successor is set up")
    leaver.signal(signal.SIGTERM)
    assert leaver.wait(15) == 75
    entry = run.wait_entered(2, 10)
    assert ([member.node_id[0] for member in entry.members], entry.generation.restart_count) == (["b"], 0)
    (left,) = run.notes("left")
    assert left["saved"] is True
    assert [note["step"] for note in run.notes("entered") if note["g"] == 2] == [left["step"]]


@pytest.mark.slow
def test_a_stop_saves_ends_every_agent_resumable_and_closes_the_run_preempted(run: StubRun) -> None:
    agents = [run.node("a", "2"), run.node("b", "2")]
    run.wait_entered(1)
    run.wait_step(10)
    run.request_stop()
    assert [agent.wait(20) for agent in agents] == [75, 75]
    assert run.wait_closed().outcome is Outcome.PREEMPTED
    assert all(note["saved"] for note in run.notes("left"))


@pytest.mark.case("R06")
@pytest.mark.slow
def test_an_error_of_one_node_ends_that_node_only(run: StubRun) -> None:
    (run.shared / "refuse-b").touch()
    healthy = run.node("a", "1:2")
    run.wait_step(5)
    broken = run.node("b", "1:2")
    assert broken.wait() == 1
    assert any("RuntimeError: set-up refused" in line for line in broken.last_lines())
    (run.shared / "enough").touch()
    assert healthy.wait() == 0
    assert run.wait_closed().outcome is Outcome.SUCCEEDED


@pytest.mark.case("E02")
@pytest.mark.slow
def test_a_frozen_node_is_fenced_and_comes_back_as_a_new_one(run: StubRun) -> None:
    for name in "ab":
        run.node(name, "1:2")
    before = run.wait_members(2)
    number, victim = before.generation.number, before.members[1].node_id
    agent = run.agent_of(victim)
    agent.freeze()
    began = time.monotonic()
    entry = run.wait_entered(number + 1, 10)
    assert (entry.generation.cause, list(entry.lost)) == (Cause.LOSS, [victim])
    assert time.monotonic() - began < 2.5
    run.wait_for(lambda facts: victim not in facts.nodes, "its key is gone")
    agent.thaw()
    entry = run.wait_entered(number + 2, 20)
    (back,) = [member.node_id for member in entry.members if member.node_id[0] == victim[0]]
    assert back != victim
    assert len(run.facts().history) == number + 2
    assert all(failure.consequence for failure in run.facts().failures)


@pytest.mark.case("R08")
@pytest.mark.slow
def test_a_minimum_that_is_never_met_is_told_every_ten_seconds_and_ends_with_its_own_code(
    run: StubRun,
) -> None:
    agents = [run.node(name, "3:4", conf="join_timeout=15") for name in "ab"]
    assert [agent.wait() for agent in agents] == [69, 69]
    told = "".join(agent.output() for agent in agents)
    assert told.count("2 of 3 nodes, waiting (timeout 15 s)") >= 2
    assert "2 of 3 nodes were ready within the join timeout of 15 s" in agents[0].last_lines()[-1]
    left = [entry.key for entry in run.store.read_prefix(run.keys.prefix).entries]
    assert left == [run.keys.closed], "nothing but the outcome"


@pytest.mark.case("E04")
@pytest.mark.case("E05")
@pytest.mark.slow
def test_training_goes_on_while_etcd_is_frozen_beyond_the_ttl_and_no_step_is_lost(
    etcd_server: EtcdServer, tmp_path: Path
) -> None:
    with (
        contextlib.closing(EtcdStore(etcd_server.endpoint)) as store,
        StubRun(store, etcd_server.endpoint, tmp_path) as run,
    ):
        for name in "ab":
            run.node(name, "2:2")
        run.wait_entered(1)
        run.wait_step(10)
        os.kill(etcd_server.pid, signal.SIGSTOP)
        before = run.step()
        try:
            wait_until(lambda: run.step() > before + 200, "training goes on", 30)
        finally:
            os.kill(etcd_server.pid, signal.SIGCONT)
        after = run.step()
        run.wait_step(after + 50)
        facts = run.facts()
        assert max(facts.history) <= 2
        assert all(entry.generation.restart_count == 0 for entry in facts.history.values())
        saved = [note["step"] for note in run.notes("left") if note["rank"] == 0]
        entered = [note["step"] for note in run.notes("entered") if note["rank"] == 0]
        assert sorted(entered) == [0, *saved], "rank 0 may be on the other node afterwards"


@pytest.mark.case("E03")
@pytest.mark.slow
def test_a_node_joins_after_etcd_was_restarted_in_mid_run(etcd_server: EtcdServer, tmp_path: Path) -> None:
    with (
        contextlib.closing(EtcdStore(etcd_server.endpoint)) as store,
        StubRun(store, etcd_server.endpoint, tmp_path) as run,
    ):
        run.node("a", "1:2")
        run.wait_step(10)
        etcd_server.kill()
        before = run.step()
        wait_until(lambda: run.step() > before + 50, "training goes on", 10)
        etcd_server.start()
        run.node("b", "1:2")
        entry = run.wait_members(2)
        assert entry.generation.number == 2
        assert [member.node_id[0] for member in entry.members] == ["a", "b"]
