"""The flow against real agents, a real etcd and a real Prefect server."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_core.model.job import JobSpec, NodeBounds, ScriptTraining
from elastic_core.model.membership import Outcome
from elastic_core.rescale.decision import Rescale
from flows.audience import RunEnd, RunSnapshot, listening
from tasks.process import carrying
from tasks.providers.local import NODE_MARK
from tasks.rescale import rescale
from tasks.runs import RunDirectory, all_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]

SCRIPT = Path(__file__).with_name("waiting_script.py")
JOB = JobSpec(
    name="waiting",
    nodes=NodeBounds(min=1, max=2, target=2),
    training=ScriptTraining(script=str(SCRIPT)),
)


class Conductor:
    """An audience that acts when something is seen."""

    def __init__(self, on_generation: Callable[[RunSnapshot], None]) -> None:
        self.end: RunEnd | None = None
        self.sentences: list[str] = []
        self._act = on_generation
        self._seen = 0

    def decided(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def saw(self, snapshot: RunSnapshot) -> None:
        current = snapshot.observation.current
        if current is not None and current.number > self._seen:
            self._seen = current.number
            self._act(snapshot)

    def ended(self, end: RunEnd) -> None:
        self.end = end


def tell(word: str) -> Callable[[RunSnapshot], None]:
    return lambda snapshot: (snapshot.attempt.directory.path / word).touch()


def train(conductor: Conductor, runs: Path, job: JobSpec = JOB) -> Any:
    from flows.train import elastic_train

    with listening(conductor):
        return elastic_train(job, runs=str(runs), return_state=True)


def processes_of(run: RunDirectory) -> list[Any]:
    nodes = (run.path.absolute() / "nodes").glob("node-*.json")
    return [process for node in nodes for process in carrying(NODE_MARK, str(node))]


def agents_of(run: RunDirectory) -> list[Any]:
    records = (run.path / "nodes").glob("node-*.json")
    return sorted(json.loads(record.read_text())["process"]["pid"] for record in records)


def test_a_job_trains_on_two_nodes_and_leaves_nothing_running(tmp_path: Path) -> None:
    conductor = Conductor(tell("finish"))
    state = train(conductor, tmp_path)
    assert (state.type, conductor.end and conductor.end.exit_code) == ("COMPLETED", 0)
    (run,) = all_runs(tmp_path)
    assert run.outcome() is Outcome.SUCCEEDED
    assert processes_of(run) == []


@pytest.mark.case("L01")
def test_the_root_cause_is_in_the_flows_failure_and_the_exit_code_is_the_scripts(tmp_path: Path) -> None:
    conductor = Conductor(tell("fail"))
    state = train(conductor, tmp_path, JOB.model_copy(update={"max_restarts": 0}))
    assert state.type == "FAILED"
    line = r"ValueError: bad label 7 at .*waiting_script\.py:12"
    assert re.search(line, state.message)
    assert conductor.end is not None
    assert conductor.end.exit_code == 1
    (run,) = all_runs(tmp_path)
    assert processes_of(run) == []
    first = json.loads(run.report_file.read_text())["first_failure"]
    assert re.search(line, first["headline"])


@pytest.mark.case("L02")
@pytest.mark.case("W02")
@pytest.mark.parametrize(
    ("word", "code", "said"),
    [("exit", 3, "SystemExit: 3"), ("kill", 137, "died by signal 9 (SIGKILL), possibly out of memory")],
)
def test_how_a_worker_ended_is_in_the_exit_code_the_flows_failure_and_the_report(
    tmp_path: Path, word: str, code: int, said: str
) -> None:
    conductor = Conductor(tell(word))
    state = train(conductor, tmp_path, JOB.model_copy(update={"max_restarts": 0}))
    assert conductor.end is not None
    assert (state.type, conductor.end.exit_code) == ("FAILED", code)
    assert said in state.message
    assert state.message.endswith(f"(exit code {code})")
    report = json.loads(all_runs(tmp_path)[0].report_file.read_text())
    assert (report["exit_code"], report["first_failure"]["exit_code"]) == (code, code)
    assert said in report["first_failure"]["headline"]
    assert word == "exit" or report["first_failure"]["rank"] == 1


def test_a_finished_run_trains_nothing_more(tmp_path: Path) -> None:
    train(Conductor(tell("finish")), tmp_path)
    (run,) = all_runs(tmp_path)
    conductor = Conductor(tell("fail"))
    with listening(conductor):
        from flows.train import elastic_train

        elastic_train(JOB, run_id=run.run, runs=str(tmp_path))
    assert conductor.end is not None
    assert (conductor.end.exit_code, run.attempt()) == (0, 1)
    assert "already complete" in conductor.end.reason


def test_a_bare_deployment_run_is_accepted(tmp_path: Path) -> None:
    from prefect.deployments import run_deployment

    from flows.train import elastic_train

    elastic_train.to_deployment(name="elastic-train").apply()
    run: Any = run_deployment("elastic-train/elastic-train", timeout=0)
    assert run.state.type == "SCHEDULED"
    assert run.parameters == {}


def test_a_running_job_grows_and_shrinks_and_its_nodes_come_and_go(tmp_path: Path) -> None:
    from flows.rescale import RescaleInput, elastic_rescale

    def act(snapshot: RunSnapshot) -> None:
        directory, current = snapshot.attempt.directory, snapshot.observation.current
        assert current is not None
        sizes.append(current.group_world_size)
        match sizes:
            case [2]:
                done.append(rescale(tmp_path, directory.run, Rescale(target=1)).headline())
            case [2, 1]:  # by word to the flow itself
                RescaleInput(target=2, max=2).send_to(FlowRunContext.get().flow_run.id)  # type: ignore[union-attr]
            case [2, 1, 2]:
                ended.extend(node.detail for node in snapshot.observation.instances if node.detail)
                (directory.path / "finish").touch()

    from prefect.context import FlowRunContext

    sizes: list[int] = []
    done: list[str] = []
    ended: list[str] = []
    conductor = Conductor(act)
    state = train(conductor, tmp_path)
    assert (state.type, sizes) == ("COMPLETED", [2, 1, 2])
    (run,) = all_runs(tmp_path)
    assert done == [f"run {run.run}: the target goes from 2 to 1 nodes (from 1 to 2)"]
    assert ended == ["ended on request"], "the provider ended the node that was released"
    assert [row["cause"] for row in json.loads(run.report_file.read_text())["generations"]] == [
        "start",
        "rescale",
        "join",
    ]
    over: Any = elastic_rescale(run.run, Rescale(target=1), runs=str(tmp_path), return_state=True)
    assert (over.type, over.message) == (
        "FAILED",
        f"Flow run encountered an exception: RefusedInput: run {run.run} does not run: "
        "start it with nodes.target in the job",
    )


# ---- the command line in its own process: signals, death, adoption ------------------------------


class Command:
    """`elastic-train train` as a process, its output read line by line."""

    def __init__(self, runs: Path, *options: str) -> None:
        from prefect.settings import PREFECT_API_URL

        job = runs.parent / "job.yaml"
        job.write_text(JOB.model_dump_json())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", str(job), "--runs", str(runs), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PREFECT_API_URL": str(PREFECT_API_URL.value()), "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip())
            if text in line:
                return line
        raise AssertionError(f"{text!r} was never printed:\n" + "\n".join(self.lines))

    def finish(self) -> int:
        rest, _ = self.process.communicate(timeout=120)
        self.lines += rest.splitlines()
        return self.process.returncode

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A directory for runs."""
    return tmp_path / "runs"


@pytest.fixture
def command(runs: Path) -> Iterator[Callable[[], Command]]:
    """Starts commands; whatever they leave is ended afterwards."""
    from tasks.etcd import EtcdProcess
    from tasks.providers.local import LocalProvider

    started: list[Command] = []

    def start() -> Command:
        started.append(Command(runs))
        return started[-1]

    yield start
    for each in started:
        each.kill()
    for run in all_runs(runs):
        LocalProvider(runs, grace_s=0).teardown(run.run)
        EtcdProcess(run).stop()


@pytest.mark.case("G02")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["begins", "generation 1"])
def test_a_stop_leaves_nothing_within_ten_seconds_and_the_same_command_goes_on(
    runs: Path, command: Callable[[], Command], number: signal.Signals, moment: str
) -> None:
    first = command()
    first.until(moment)
    asked_at = time.monotonic()
    first.process.send_signal(number)
    assert first.finish() == 75
    (run,) = all_runs(runs)
    assert processes_of(run) == []
    assert time.monotonic() - asked_at < 10
    assert run.outcome() is Outcome.PREEMPTED
    assert first.lines[-1] == f"report: {run.report_file}"

    again = command()
    again.until("attempt 2 of run")
    (run.path / "finish").touch()
    assert again.finish() == 0
    assert [found.run for found in all_runs(runs)] == [run.run]


def test_a_killed_flows_nodes_are_adopted_and_never_doubled(
    runs: Path, command: Callable[[], Command]
) -> None:
    first = command()
    first.until("generation 1")
    first.kill()
    (run,) = all_runs(runs)
    agents = agents_of(run)
    assert len(agents) == 2

    again = command()
    again.until("adopted attempt 1")
    again.until("generation 1")
    assert agents_of(run) == agents
    (run.path / "finish").touch()
    assert again.finish() == 0
    assert run.attempt() == 1
    assert processes_of(run) == []


@pytest.mark.case("P06")
def test_a_second_flow_of_a_job_is_refused_and_creates_nothing(
    runs: Path, command: Callable[[], Command]
) -> None:
    first = command()
    first.until("generation 1")
    (run,) = all_runs(runs)
    second = command()
    assert second.finish() == 2
    assert second.lines[-1].startswith(f"job 'waiting' is already running (run {run.run})")
    assert [found.run for found in all_runs(runs)] == [run.run]
    (run.path / "finish").touch()
    assert first.finish() == 0
    assert json.loads(run.report_file.read_text())["state"] == "succeeded"
