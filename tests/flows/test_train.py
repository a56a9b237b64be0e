"""The flow against real agents, a real etcd and a real Prefect server."""

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_core.model.job import JobSpec
from elastic_core.model.job_file import parse_job, read_mapping
from elastic_core.model.membership import Outcome
from elastic_core.rescale.decision import Rescale
from flows.audience import RunEnd, RunSnapshot, listening
from tasks.overrides import apply_overrides
from tasks.rescale import rescale
from tasks.runs import all_runs
from tasks.validate import resolve
from tests.flows.command import JOB, processes_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("prefect_server")]


class Watcher:
    """An audience that acts at every sight of the run, and remembers."""

    def __init__(self, act: Callable[[RunSnapshot], None]) -> None:
        self.end: RunEnd | None = None
        self.sentences: list[str] = []
        self._act = act

    def decided(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def saw(self, snapshot: RunSnapshot) -> None:
        self._act(snapshot)

    def ended(self, end: RunEnd) -> None:
        self.end = end


class Conductor(Watcher):
    """Acts at each new generation."""

    def __init__(self, act: Callable[[RunSnapshot], None]) -> None:
        super().__init__(act)
        self._seen = 0

    def saw(self, snapshot: RunSnapshot) -> None:
        current = snapshot.observation.current
        if current is not None and current.number > self._seen:
            self._seen = current.number
            self._act(snapshot)


def tell(word: str) -> Callable[[RunSnapshot], None]:
    return lambda snapshot: (snapshot.attempt.directory.path / word).touch()


def train(watcher: Watcher, runs: Path, job: JobSpec = JOB) -> Any:
    from flows.train import elastic_train

    with listening(watcher):
        return elastic_train(job, runs=str(runs), return_state=True)


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


@pytest.mark.case("C05")
def test_a_restarted_worker_finds_the_state_of_its_run_in_the_runs_own_folder(tmp_path: Path) -> None:
    killed: list[int] = []

    def kill_after_the_first_epoch(snapshot: RunSnapshot) -> None:
        progress = snapshot.observation.progress
        if killed or progress is None or progress.epoch < 1:
            return
        processes = processes_of(snapshot.attempt.directory)
        (worker,) = [
            one.pid for one in processes if Path(f"/proc/{one.pid}/comm").read_text() == "worker-0\n"
        ]
        os.kill(worker, signal.SIGKILL)
        killed.append(progress.step)

    settings = ["nodes.target=1", "checkpoint.every_steps=5"]
    mapping = apply_overrides(read_mapping(Path("examples/digits.yaml")), settings)
    job = resolve(parse_job(mapping, "examples/digits.yaml"))
    before = set(Path.cwd().iterdir())
    assert train(Watcher(kill_after_the_first_epoch), tmp_path, job).type == "COMPLETED"
    (run,) = all_runs(tmp_path)
    first, second = json.loads(run.report_file.read_text())["generations"]
    assert (first["source"], second["source"], second["cause"]) == ("fresh", "checkpoint", "failure")
    assert killed[0] - 5 <= second["step"]
    assert second["step"] >= 23, "the second epoch goes on"
    assert (run.path / "model").is_dir()
    assert set(Path.cwd().iterdir()) == before
