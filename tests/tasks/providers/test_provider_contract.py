"""What every node provider must do, the fake one included."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.cluster.provider import InstanceState, LaunchRequest, NodeProvider
from elastic_core.ids import RunId
from elastic_core.model.job import DockerPool
from elastic_core.testing.fake_provider import FakeProvider
from tasks.providers.docker import DockerProvider
from tasks.providers.local import LocalProvider
from tests.docker.engine import RUN

OTHER = RunId(f"{RUN}-other")


DOCKER = pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow])


def made_of(kind: str, request: pytest.FixtureRequest, runs: Path) -> NodeProvider:
    match kind:
        case "local":
            return LocalProvider(runs, agent="tests.tasks.providers.stub_agent")
        case "docker":
            pool = DockerPool(image=request.getfixturevalue("stub_image"), shm_gib=0.0625)
            return DockerProvider(runs, pool, grace_s=1)
        case _:
            return FakeProvider()


@pytest.fixture(params=["fake", "local", DOCKER])
def provider(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[NodeProvider]:
    made = made_of(request.param, request, tmp_path)
    yield made
    made.teardown(RUN)
    made.teardown(OTHER)


def wanted(token: str, count: int = 1, run: RunId = RUN, command: tuple[str, ...] = ()) -> LaunchRequest:
    return LaunchRequest(run=run, token=token, count=count, command=command)


def states(provider: NodeProvider, run: RunId = RUN) -> dict[str, InstanceState]:
    return {instance.name: instance.state for instance in provider.list_nodes(run)}


def test_a_run_that_was_never_launched_has_no_nodes(provider: NodeProvider) -> None:
    assert list(provider.list_nodes(RUN)) == []


def test_launched_nodes_are_listed_as_running(provider: NodeProvider) -> None:
    result = provider.launch(wanted("start", 2))
    assert (len(result.launched), result.shortfall) == (2, 0)
    assert states(provider) == {node.name: InstanceState.RUNNING for node in result.launched}


def test_a_token_never_launches_twice(provider: NodeProvider) -> None:
    first = provider.launch(wanted("start", 2))
    again = provider.launch(wanted("start", 2))
    assert [node.name for node in again.launched] == [node.name for node in first.launched]
    assert len(states(provider)) == 2


def test_a_token_whose_node_ended_does_not_bring_it_back(provider: NodeProvider) -> None:
    name = provider.launch(wanted("start")).launched[0].name
    provider.terminate(RUN, [name])
    again = provider.launch(wanted("start"))
    assert [(node.name, node.state) for node in again.launched] == [(name, InstanceState.ENDED)]


def test_another_token_makes_nodes_with_new_names(provider: NodeProvider) -> None:
    first = provider.launch(wanted("start", 2))
    provider.terminate(RUN, [first.launched[0].name])
    second = provider.launch(wanted("replace"))
    assert {node.name for node in first.launched}.isdisjoint(node.name for node in second.launched)


def test_runs_do_not_see_each_others_nodes(provider: NodeProvider) -> None:
    provider.launch(wanted("start", 1, RUN))
    provider.launch(wanted("start", 1, OTHER))
    provider.teardown(RUN)
    assert list(states(provider, RUN).values()) == [InstanceState.ENDED]
    assert list(states(provider, OTHER).values()) == [InstanceState.RUNNING]


def test_terminate_ends_the_named_nodes_only_and_may_be_repeated(provider: NodeProvider) -> None:
    gone, stays = (node.name for node in provider.launch(wanted("start", 2)).launched)
    provider.terminate(RUN, [gone])
    provider.terminate(RUN, [gone])
    assert states(provider) == {gone: InstanceState.ENDED, stays: InstanceState.RUNNING}


def test_ending_an_unknown_node_succeeds(provider: NodeProvider) -> None:
    provider.terminate(RUN, ["node-77"])
    assert states(provider) == {}


def test_teardown_ends_everything_and_may_be_repeated(provider: NodeProvider) -> None:
    provider.launch(wanted("start", 2))
    provider.teardown(RUN)
    provider.teardown(RUN)
    assert set(states(provider).values()) == {InstanceState.ENDED}


def test_there_are_no_interruptions_without_a_notice(provider: NodeProvider) -> None:
    provider.launch(wanted("start"))
    assert list(provider.interruptions(RUN)) == []
