"""What nodes said is shown with its source, to the last line, also while it grows."""

import threading
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.model.job import AwsPool, JobSpec
from tasks.logs import RunLogs
from tasks.runs import RunDirectory


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "digits-1")
    directory.path.mkdir()
    directory.begin_attempt(JobSpec(), now=0)
    return directory


def write(run: RunDirectory, node: str, name: str, text: str, mode: str = "a") -> None:
    path = run.path / "logs" / node / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open(mode) as stream:
        stream.write(text)


@pytest.mark.case("L07")
def test_the_last_lines_of_each_log_are_shown_with_node_and_process(run: RunDirectory) -> None:
    write(run, "node-1", "agent.log", "one\ntwo\nthree\n")
    write(run, "node-1", "worker-0.log", "step 1\n")
    write(run, "node-2", "agent.log", "other\n")
    assert list(RunLogs(run).tail(2)) == [
        "node-1 agent | two",
        "node-1 agent | three",
        "node-1 worker-0 | step 1",
        "node-2 agent | other",
    ]
    assert list(RunLogs(run, "node-2").tail(2)) == ["node-2 agent | other"]


@pytest.mark.case("L06")
def test_following_shows_what_comes_later_also_of_new_nodes_and_the_last_line_without_its_end(
    run: RunDirectory,
) -> None:
    write(run, "node-1", "agent.log", "before\nhal")
    logs = RunLogs(run)
    assert list(logs.tail(5)) == ["node-1 agent | before"]
    over = threading.Event()
    lines = logs.follow(over.is_set)
    write(run, "node-1", "agent.log", "f\n")
    assert next(lines) == "node-1 agent | half"
    write(run, "node-2", "agent.log", "late\nthe very last")
    assert next(lines) == "node-2 agent | late"
    over.set()
    assert list(lines) == ["node-2 agent | the very last"]


@pytest.mark.case("L06")
def test_a_log_that_was_written_anew_is_read_from_its_beginning(run: RunDirectory) -> None:
    write(run, "node-1", "agent.log", "a long line of the first one\n")
    logs = RunLogs(run)
    list(logs.tail(1))
    write(run, "node-1", "agent.log", "new\n", mode="w")
    assert list(logs.follow(lambda: True)) == ["node-1 agent | new"]


@pytest.mark.case("P09")
def test_a_line_of_megabytes_is_shown_in_pieces(run: RunDirectory) -> None:
    write(run, "node-1", "worker-0.log", "x" * (3 << 20) + "\nend\n")
    shown = list(RunLogs(run).tail(1000))
    assert shown[-1] == "node-1 worker-0 | end"
    assert sum(line.count("x") for line in shown) == 3 << 20


def test_an_unknown_node_is_refused_with_those_that_there_are(run: RunDirectory) -> None:
    write(run, "node-1", "agent.log", "")
    with pytest.raises(RefusedInput) as refused:
        RunLogs(run, "node-7")
    assert refused.value.problems[0].startswith("--node 'node-7': run digits-1 has node-1")


@pytest.mark.case("L07")
def test_where_nothing_is_here_it_says_where_to_look(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "digits-2")
    directory.path.mkdir()
    directory.begin_attempt(JobSpec(pool=AwsPool()), now=0)
    with pytest.raises(RefusedInput, match="nodes on AWS write to the log group of their cluster"):
        RunLogs(directory)
