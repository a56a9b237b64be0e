"""Real agents on a real etcd with scripts of torchrun's contract: what they see, and how they end."""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from elastic_core.model.failure import Failure
from elastic_core.model.membership import Cause, Outcome
from elastic_core.store.etcd import EtcdStore
from elastic_core.testing.agents import AgentProcess, AgentRun, descendants
from tests.elastic_core.agent.node import is_alive, wait_until

SCRIPTS = Path(__file__).parents[2] / "scripts"
NUMBERS = itertools.count(1)


class ScriptRun(AgentRun):
    """A run of a script."""

    def __init__(self, store: EtcdStore, endpoint: str, directory: Path) -> None:
        super().__init__(store, endpoint, f"script-{next(NUMBERS)}-{int(time.time())}", directory)
        self.shared = directory / "shared"
        self.shared.mkdir()

    def node(
        self,
        name: str,
        *arguments: str,
        nodes: str = "2",
        start: str = "fork",
        conf: str = "",
        environment: Mapping[str, str] | None = None,
    ) -> AgentProcess:
        waits = f"lease_ttl=2,last_call_timeout=1,join_timeout=60,{conf}"
        known = [f"--nnodes={nodes}", f"--rdzv-conf={waits}", f"--start-method={start}"]
        return self.start(name, *known, *arguments, environment=environment)

    def gloo(
        self,
        name: str,
        *flags: str,
        nodes: str = "2",
        steps: int = 100_000,
        environment: Mapping[str, str] | None = None,
    ) -> AgentProcess:
        program = (str(SCRIPTS / "gloo_steps.py"), str(self.shared), f"--steps={steps}")
        return self.node(name, *flags, *program, nodes=nodes, environment=environment)

    def wait_step(self, step: int) -> None:  # type: ignore[override]
        """Wait until the script's own checkpoint has a step."""
        state = self.shared / "state"
        wait_until(lambda: state.exists() and int(state.read_text() or "0") >= step, f"step {step}")

    def notes(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.shared / "notes.jsonl").read_text().splitlines()]


@pytest.fixture
def run(store: EtcdStore, etcd_endpoint: str, tmp_path: Path) -> Iterator[ScriptRun]:
    with ScriptRun(store, etcd_endpoint, tmp_path) as run:
        yield run


@pytest.fixture
def short_directory() -> Iterator[Path]:
    """A directory whose path leaves room for a socket's; pytest's own does not always."""
    with tempfile.TemporaryDirectory(prefix="et-") as directory:
        yield Path(directory)


def first_failure(run: ScriptRun) -> Failure:
    return next(failure for failure in run.facts().failures if not failure.consequence)


# ---- what a script sees ----------------------------------------------------------------------


@pytest.mark.case("L04")
def test_a_script_sees_its_arguments_byte_for_byte_and_torchruns_whole_contract(run: ScriptRun) -> None:
    odd = ["--note", "a b", "$HOME", "50%d", "", "--nnodes=7", "-m", "é\n", "--", "x=y"]
    program = [str(SCRIPTS / "echo_arguments.py"), str(run.shared / "seen")]
    agents = [
        run.node(
            name, "--nproc-per-node=2", "--max-restarts=4", "--role=trainer", *program, *odd, start="spawn"
        )
        for name in "ab"
    ]
    assert [agent.wait() for agent in agents] == [0, 0]
    seen = {rank: json.loads((run.shared / f"seen.{rank}").read_text()) for rank in range(4)}
    for rank, content in seen.items():
        assert content["argv"] == [*program, *odd]
        told = {name: value for name, value in content["env"].items() if name in CONTRACT}
        assert told == {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "GROUP_RANK": str(rank // 2),
            "ROLE_RANK": str(rank),
            "ROLE_NAME": "trainer",
            "LOCAL_WORLD_SIZE": "2",
            "WORLD_SIZE": "4",
            "GROUP_WORLD_SIZE": "2",
            "ROLE_WORLD_SIZE": "4",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "4",
            "TORCHELASTIC_RUN_ID": run.keys.run,
            "TORCHELASTIC_USE_AGENT_STORE": "False",
            "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        assert 20_000 <= int(content["env"]["MASTER_PORT"]) < 30_000
    assert len({content["env"]["MASTER_PORT"] for content in seen.values()}) == 1


CONTRACT = {
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "LOCAL_WORLD_SIZE", "WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS",
    "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS", "MASTER_ADDR",
}  # fmt: skip


# ---- how it ends -----------------------------------------------------------------------------


@pytest.mark.case("L02")
def test_a_programs_own_exit_code_is_the_agents(run: ScriptRun) -> None:
    agent = run.node("a", "--no-python", "bash", "-c", "exit 3", nodes="1")
    assert agent.wait() == 3
    assert any("rank 0 on node a." in line and "ended with code 3" in line for line in agent.last_lines())


@pytest.mark.slow
def test_a_program_killed_by_a_signal_ends_the_agent_with_128_and_its_number(run: ScriptRun) -> None:
    agent = run.node("a", "--no-python", "bash", "-c", "kill -9 $$", nodes="1")
    assert agent.wait() == 137
    assert "died by signal 9 (SIGKILL), possibly out of memory" in agent.last_lines()[-1]


@pytest.mark.case("W07")
@pytest.mark.slow
def test_a_script_that_does_not_even_parse_ends_without_a_restart_and_names_the_line(run: ScriptRun) -> None:
    script = run.shared / "broken.py"
    script.write_text("x = 1\nif x\n    pass\n")
    flags = ("--max-restarts=5", "--nproc-per-node=2")
    agents = [run.node(name, *flags, str(script), start="spawn") for name in "ab"]
    run.wait_entered(1)
    began = time.monotonic()
    assert [agent.wait(30) for agent in agents] == [1, 1]
    assert time.monotonic() - began < 15
    assert run.wait_closed().outcome is Outcome.FAILED
    assert list(run.facts().history) == [1]
    for agent in agents:
        assert any("SyntaxError" in line and "broken.py:2" in line for line in agent.last_lines())
    console = "".join(agent.output() for agent in agents)
    assert console.count(f'  File "{script}", line 2\n') == 1, console


@pytest.mark.slow
def test_a_script_that_cannot_be_read_on_one_node_any_more_ends_only_that_node(run: ScriptRun) -> None:
    script = run.shared / "program.sh"
    mine = run.shared / "mine.py"
    stop = str(run.shared / "stop")
    text = f"import time, pathlib\nwhile not pathlib.Path({stop!r}).exists(): time.sleep(0.05)\n"
    script.write_text(text)
    mine.write_text(text)
    healthy = run.node("a", str(script), nodes="1:2", start="spawn")
    run.wait_entered(1)
    broken = run.node("b", str(mine), nodes="1:2", start="spawn", conf="last_call_timeout=1")
    run.wait_for(lambda facts: len(facts.nodes) == 2, "b is registered")
    mine.unlink()
    assert broken.wait() == 1
    assert "cannot be read on this node" in broken.last_lines()[-1]
    (run.shared / "stop").touch()
    assert healthy.wait() == 0


@pytest.mark.case("R07")
@pytest.mark.slow
def test_the_same_run_id_after_success_is_told_which_run_holds_it_and_another_one_trains(
    run: ScriptRun,
) -> None:
    program = ("--no-python", "true")
    assert run.node("a", *program, nodes="1").wait() == 0
    again = run.node("a", *program, nodes="1")
    assert again.wait() == 0
    assert f"run {run.keys.run} ended well: job finished" in again.last_lines()[-1]
    assert run.node("a", f"--rdzv-id={run.keys.run}-b", *program, nodes="1").wait() == 0


@pytest.mark.case("W01")
@pytest.mark.slow
def test_a_killed_agent_leaves_no_process_and_no_port_behind(run: ScriptRun) -> None:
    agent = run.node("a", "--nproc-per-node=2", "--no-python", "sleep", "1000", nodes="1")
    port = run.wait_entered(1).generation.master_port
    wait_until(lambda: len(descendants(agent.pid)) >= 3, "both workers run")
    processes = descendants(agent.pid)
    agent.kill()
    wait_until(lambda: not any(map(is_alive, processes)), "all are dead", 2.0)
    with socket.socket() as probe:
        probe.bind(("", port))


@pytest.mark.case("W01")
@pytest.mark.slow
def test_what_a_killed_agent_left_on_disk_is_swept_by_the_next(run: ScriptRun, short_directory: Path) -> None:
    temporary = short_directory
    environment = {"TMPDIR": str(temporary)}
    program = ("--nnodes=1", "--no-python", "sleep", "1000")
    killed = run.start("a", *program, environment=environment)
    run.wait_entered(1)
    killed.kill()
    assert len(list(temporary.iterdir())) == 1
    living = run.start("b", *program, environment=environment)
    run.wait_entered(2)
    assert len(list(temporary.iterdir())) == 1
    living.signal(signal.SIGTERM)
    assert living.wait(15) == 75
    assert list(temporary.iterdir()) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_node_whose_program_ignores_the_first(run: ScriptRun) -> None:
    script = "trap '' TERM; touch $0; while true; do sleep 0.1; done"
    agent = run.node("a", "--no-python", "bash", "-c", script, str(run.shared / "trapped"), nodes="1")
    wait_until((run.shared / "trapped").exists, "the program runs")
    agent.signal(signal.SIGTERM)
    wait_until(lambda: "draining: SIGTERM" in agent.output(), "the first signal is heard")
    agent.signal(signal.SIGTERM)
    assert agent.wait(5) == 143


@pytest.mark.case("R11")
@pytest.mark.slow
def test_a_node_beyond_the_maximum_ends_well_with_the_job_and_never_started_a_worker(run: ScriptRun) -> None:
    finish = run.shared / "finish"
    program = ("--no-python", "bash", "-c", f"echo started; until test -e {finish}; do sleep 0.1; done")
    trained = [run.node(name, *program, nodes="2") for name in "ab"]
    run.wait_entered(1)
    spare = run.node("c", *program, nodes="2")
    wait_until(lambda: "standby" in spare.output(), "the spare says so")
    finish.touch()
    assert [agent.wait() for agent in (*trained, spare)] == [0, 0, 0]
    assert [agent.output().count("started\n") for agent in (*trained, spare)] == [1, 1, 0]


@pytest.mark.case("R17")
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["etcd", "etcd-v2"])
def test_the_old_names_of_the_backend_mean_etcd_v3_and_are_told_once(run: ScriptRun, backend: str) -> None:
    agent = run.node("a", f"--rdzv-backend={backend}", "--no-python", "true", nodes="1")
    assert agent.wait() == 0
    assert agent.output().count(f"--rdzv-backend {backend}: using etcd v3") == 1


@pytest.mark.case("R20")
@pytest.mark.slow
def test_who_finished_first_waits_for_the_others_says_so_and_all_end_well(run: ScriptRun) -> None:
    finish = run.shared / "finish"
    late = f'test "$RANK" = 0 || until test -e {finish}; do sleep 0.1; done'
    agents = [run.node(name, "--no-python", "bash", "-c", late) for name in "ab"]
    waits = "1 of 2 nodes finished generation 1"
    wait_until(lambda: any(waits in agent.output() for agent in agents), "the wait is told")
    assert [agent.is_running for agent in agents] == [True, True]
    finish.touch()
    assert [agent.wait() for agent in agents] == [0, 0]
    assert run.wait_closed().outcome is Outcome.SUCCEEDED


SAVES = """
cd "$0" && echo before > state
trap 'touch saving; sleep 2; echo after > draft; mv draft state; exit 0' TERM
touch trapped; while true; do sleep 0.1; done
"""


@pytest.mark.case("G01")
@pytest.mark.slow
@pytest.mark.parametrize(("grace", "state"), [("20", "after\n"), ("0.5", "before\n")])
def test_a_program_saves_within_its_grace_and_one_that_is_killed_has_its_last_state(
    run: ScriptRun, grace: str, state: str
) -> None:
    program = ("--no-python", "bash", "-c", SAVES, str(run.shared))
    agent = run.node("a", *program, nodes="1", conf=f"stop_grace={grace}")
    wait_until((run.shared / "trapped").exists, "the program runs")
    agent.signal(signal.SIGTERM)
    assert agent.wait(15) == 75
    assert (run.shared / "state").read_text() == state


@pytest.mark.case("G10")
@pytest.mark.slow
def test_a_second_signal_during_the_save_leaves_the_state_before_it(run: ScriptRun) -> None:
    agent = run.node("a", "--no-python", "bash", "-c", SAVES, str(run.shared), nodes="1")
    wait_until((run.shared / "trapped").exists, "the program runs")
    agent.signal(signal.SIGTERM)
    wait_until((run.shared / "saving").exists, "it saves")
    agent.signal(signal.SIGTERM)
    assert agent.wait(5) == 143
    assert (run.shared / "state").read_text() == "before\n"


# ---- groups ----------------------------------------------------------------------------------


@pytest.mark.case("W02")
@pytest.mark.case("W03")
@pytest.mark.slow
def test_a_killed_worker_is_named_first_and_every_agent_ends_soon_with_its_code(run: ScriptRun) -> None:
    agents = [run.gloo(name) for name in "ab"]
    run.wait_step(10)
    (run.shared / "fail-1").write_text("kill")
    began = time.monotonic()
    assert [agent.wait(15) for agent in agents] == [137, 137]
    assert time.monotonic() - began < 15
    failure = first_failure(run)
    assert (failure.rank, failure.exit_code) == (1, 137)
    assert [other.rank for other in run.facts().failures if other.consequence] == [0]
    for agent in agents:
        assert sum(line.startswith("  consequence: rank 0 on node") for line in agent.last_lines()) == 1
        (verdict,) = [line for line in agent.last_lines() if line.startswith("elastic-agent: run")]
        assert "1 failure, budget 0: rank 1 on node" in verdict
        assert "died by signal 9 (SIGKILL), possibly out of memory" in verdict


@pytest.mark.case("W10")
@pytest.mark.slow
def test_a_rank_that_ends_well_while_its_peer_runs_on_ends_the_run_after_the_declared_time(
    run: ScriptRun, tmp_path: Path
) -> None:
    script = tmp_path / "partial.py"
    script.write_text("import os, signal\nif os.environ['RANK'] == '1':\n    signal.pause()\n")
    conf = "partial_exit_timeout=1,stop_grace=1"
    agent = run.node("a", "--nproc-per-node=2", str(script), nodes="1", start="spawn", conf=conf)
    workers = run.wait_for(lambda facts: facts.entered(1), "it trains") and descendants(agent.pid)
    assert agent.wait(30) == 1
    assert "rank 0 ended with code 0, this one still runs 1 s later" in agent.output().splitlines()[-1]
    assert not any(map(is_alive, workers))


@pytest.mark.case("L01")
@pytest.mark.slow
def test_an_exception_is_in_the_last_lines_with_file_and_line(run: ScriptRun) -> None:
    agents = [run.gloo(name) for name in "ab"]
    run.wait_step(10)
    (run.shared / "fail-1").write_text("raise")
    assert [agent.wait(15) for agent in agents] == [1, 1]
    source = (SCRIPTS / "gloo_steps.py").read_text().splitlines()
    number = 1 + source.index('    raise ValueError("bad label 7")')
    for agent in agents:
        assert any(
            "ValueError: bad label 7 at " in line and f"gloo_steps.py:{number}" in line
            for line in agent.last_lines()
        )


@pytest.mark.slow
def test_a_failure_is_mended_by_a_warm_restart_from_the_scripts_own_checkpoint(run: ScriptRun) -> None:
    agents = [run.gloo(name, "--max-restarts=1", steps=200) for name in "ab"]
    run.wait_step(30)
    (run.shared / "fail-0").write_text("exit")
    assert [agent.wait() for agent in agents] == [0, 0]
    entry = run.facts().history[2]
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.FAILURE, 1)
    assert {note["restarts"] for note in run.notes() if "done" in note} == {1}


@pytest.mark.slow
def test_a_node_joins_and_leaves_a_running_script_and_nothing_counts_as_a_restart(run: ScriptRun) -> None:
    first = run.gloo("a", nodes="1:2")
    run.wait_step(20)
    second = run.gloo("b", nodes="1:2")
    joined = run.wait_entered(2)
    assert joined.generation.cause is Cause.JOIN
    wait_until(lambda: any(note.get("world") == 2 for note in run.notes()), "both train")
    second.signal(signal.SIGTERM)
    left = run.wait_entered(3, 10)
    assert (left.generation.cause, left.generation.restart_count) == (Cause.DRAIN, 0)
    assert second.wait(15) == 75
    (run.shared / "enough").touch()
    assert first.wait() == 0
    starts = [note["start"] for note in run.notes() if note.get("rank") == 0 and "start" in note]
    leaves = [note["left"] for note in run.notes() if note.get("rank") == 0 and "left" in note]
    assert starts == [0, *leaves]


@pytest.mark.case("R02")
@pytest.mark.slow
def test_a_killed_node_of_a_script_is_a_loss_and_no_restart(run: ScriptRun) -> None:
    agents = {name: run.gloo(name, nodes="1:2") for name in "ab"}
    wait_until(lambda: (run.shared / "notes.jsonl").exists(), "training starts")
    number = run.wait_for(
        lambda facts: next(
            (n for n, e in facts.history.items() if len(e.members) == 2 and facts.entered(n)), 0
        ),
        "two nodes train",
    )
    run.wait_step(20)
    victim = run.facts().history[number].members[1].node_id
    began = time.monotonic()
    agents[victim[0]].kill()
    entry = run.wait_entered(number + 1, 10)
    assert time.monotonic() - began < 2.5
    assert (entry.generation.cause, entry.generation.restart_count) == (Cause.LOSS, 0)


@pytest.mark.case("R19")
@pytest.mark.slow
def test_a_node_whose_clock_is_wrong_by_minutes_trains_as_any_other(run: ScriptRun, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nreal = time.time\ntime.time = lambda: real() + 600\n"
    )
    early = run.gloo("a", steps=60)
    late = run.gloo(
        "b", steps=60, environment={"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    )
    assert [early.wait(), late.wait()] == [0, 0]
    (entry,) = run.facts().history.values()
    assert entry.lost == {}
    times = {note["rank"]: note["t"] for note in run.notes() if "done" in note}
    assert abs(times[0] - times[1]) > 300, "its clock is wrong"
