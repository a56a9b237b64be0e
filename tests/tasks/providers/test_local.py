"""Local nodes: adoption by another process, exit codes, and nothing left behind."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_core.cluster.provider import Instance, InstanceState, LaunchRequest
from elastic_core.ids import RunId
from elastic_core.model.codec import decode, encode
from tasks.process import ProcessIdentity, carrying, identify
from tasks.providers.local import NODE_MARK, LocalProvider, NodeOnDisk

RUN = RunId("digits-1")
AGENT = "tests.tasks.providers.stub_agent"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    LocalProvider(tmp_path, grace_s=0, agent=AGENT).teardown(RUN)


def launch(provider: LocalProvider, *command: str, token: str = "t") -> Instance:
    return provider.launch(LaunchRequest(run=RUN, token=token, count=1, command=command)).launched[0]


def record_path(runs: Path, name: str = "node-1") -> Path:
    return runs / RUN / "nodes" / f"{name}.json"


def record(runs: Path, name: str = "node-1") -> NodeOnDisk:
    return decode(NodeOnDisk, record_path(runs, name).read_bytes())


def eventually(fact: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not fact():
        assert time.monotonic() < deadline, "the fact did not come true in time"
        time.sleep(0.01)


def started(instance: Instance) -> bool:
    return "name" in Path(instance.log).read_text()


def ended(provider: LocalProvider) -> Callable[[], bool]:
    return lambda: provider.list_nodes(RUN)[0].state is InstanceState.ENDED


@pytest.mark.case("L04")
def test_the_command_reaches_the_agent_byte_for_byte_after_its_name(runs: Path) -> None:
    node = launch(LocalProvider(runs, agent=AGENT), "--exit", "0", "--", "a b", "$HOME", "50%d", "")
    eventually(lambda: started(node))
    assert "name node-1 rest ['--', 'a b', '$HOME', '50%d', '']" in Path(node.log).read_text()


def test_credentials_of_the_orchestrator_do_not_reach_a_node(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "canary")
    node = launch(LocalProvider(runs, agent=AGENT))
    eventually(lambda: started(node))
    assert "prefect False" in Path(node.log).read_text()


def test_another_provider_adopts_a_running_node(runs: Path) -> None:
    launch(LocalProvider(runs, agent=AGENT))
    rerun = LocalProvider(runs, agent=AGENT)
    assert [node.state for node in rerun.list_nodes(RUN)] == [InstanceState.RUNNING]
    again = launch(rerun)
    assert (again.name, again.state) == ("node-1", InstanceState.RUNNING)


def test_a_node_whose_starter_died_before_it_wrote_the_pid_is_adopted_not_doubled(runs: Path) -> None:
    launch(LocalProvider(runs, agent=AGENT))
    whole = record(runs)
    record_path(runs).write_bytes(
        encode(NodeOnDisk(name=whole.name, token=whole.token, log=whole.log, launched_at=0.0))
    )
    node = launch(LocalProvider(runs, agent=AGENT))
    assert node.state is InstanceState.RUNNING
    assert record(runs).process == whole.process
    assert carrying(NODE_MARK, str(record_path(runs))) == [whole.process]


def test_a_node_whose_starter_died_before_it_wrote_the_pid_is_seen_to_run(runs: Path) -> None:
    launch(LocalProvider(runs, agent=AGENT))
    written = record(runs)
    record_path(runs).write_bytes(encode(replace(written, process=None)))

    (seen,) = LocalProvider(runs, agent=AGENT).list_nodes(RUN)
    assert seen.state is InstanceState.RUNNING
    assert record(runs) == written


@pytest.mark.parametrize("code", [0, 3, 75])
def test_the_parent_learns_the_exit_code(runs: Path, code: int) -> None:
    provider = LocalProvider(runs, agent=AGENT)
    launch(provider, "--exit", str(code))
    eventually(ended(provider))
    assert provider.list_nodes(RUN)[0].exit_code == code


def test_a_stranger_learns_the_exit_code_too(runs: Path) -> None:
    parent, stranger = LocalProvider(runs, agent=AGENT), LocalProvider(runs, agent=AGENT)
    launch(parent, "--exit", "69")
    eventually(ended(stranger))
    assert stranger.list_nodes(RUN)[0].exit_code == 69
    eventually(ended(parent))


def test_the_parent_tells_a_killing_signal(runs: Path) -> None:
    provider = LocalProvider(runs, agent=AGENT)
    launch(provider)
    os.kill(record(runs).process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    eventually(ended(provider))
    node = provider.list_nodes(RUN)[0]
    assert (node.exit_code, node.detail) == (137, "killed by signal 9")


def test_a_stranger_tells_a_killed_node_from_one_that_ended(runs: Path) -> None:
    parent, stranger = LocalProvider(runs, agent=AGENT), LocalProvider(runs, agent=AGENT)
    launch(parent)
    os.kill(record(runs).process.pid, signal.SIGKILL)  # type: ignore[union-attr]
    eventually(ended(stranger))
    node = stranger.list_nodes(RUN)[0]
    assert (node.exit_code, node.detail) == (None, "was killed")


def test_a_recycled_pid_is_never_taken_for_the_node(runs: Path) -> None:
    me = identify(os.getpid())
    assert me is not None
    impostor = ProcessIdentity(pid=me.pid, start_ticks=me.start_ticks - 1, boot=me.boot)
    record_path(runs).parent.mkdir(parents=True)
    record_path(runs).write_bytes(
        encode(NodeOnDisk(name="node-1", token="t", log="", launched_at=0.0, process=impostor))
    )
    provider = LocalProvider(runs, grace_s=0, agent=AGENT)
    assert provider.list_nodes(RUN)[0].state is InstanceState.ENDED
    provider.terminate(RUN, ["node-1"])  # would end this very test process
    assert identify(os.getpid()) == me


def test_a_deaf_agent_and_its_children_in_other_sessions_are_killed_after_the_grace(runs: Path) -> None:
    provider = LocalProvider(runs, grace_s=0.3, agent=AGENT)
    node = launch(provider, "--deaf", "--child")
    eventually(lambda: started(node))
    assert len(carrying(NODE_MARK, str(record_path(runs)))) == 2
    provider.terminate(RUN, ["node-1"])
    assert carrying(NODE_MARK, str(record_path(runs))) == []
    assert provider.list_nodes(RUN)[0].exit_code == 137


def test_an_agent_that_leaves_on_sigterm_is_not_killed(runs: Path) -> None:
    provider = LocalProvider(runs, grace_s=10, agent=AGENT)
    launched = launch(provider)
    eventually(lambda: started(launched))
    provider.terminate(RUN, ["node-1"])
    node = provider.list_nodes(RUN)[0]
    assert (node.exit_code, node.detail) == (75, "ended on request")


def test_a_killed_node_has_no_process_left_in_any_session(runs: Path) -> None:
    provider = LocalProvider(runs, agent=AGENT)
    node = launch(provider, "--child")
    eventually(lambda: started(node))
    provider.kill(RUN, "node-1")
    eventually(ended(provider))
    eventually(lambda: carrying(NODE_MARK, str(record_path(runs))) == [])
    assert provider.list_nodes(RUN)[0].detail == "killed by signal 9"
