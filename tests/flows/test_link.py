"""The side thread keeps one artifact a key up to date, and hears of its own flow run's state."""

import threading
from collections.abc import Callable, Iterator, Mapping
from uuid import UUID, uuid4

import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId
from prefect.states import Cancelling, Running

from elastic_core.rescale.decision import Rescale
from flows.link import ArtifactContent, PrefectLink

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("prefect_server")]


@flow(name="linked")
def linked() -> None:
    """Exist on the server."""


@pytest.fixture
def client(prefect_server: None) -> Iterator[SyncPrefectClient]:
    with get_client(sync_client=True) as made:
        yield made


@pytest.fixture
def flow_run(client: SyncPrefectClient) -> UUID:
    return client.create_flow_run(linked, state=Running()).id


def showing(percent: float) -> Callable[[], Mapping[str, ArtifactContent]]:
    return lambda: {"digits-1-progress": ArtifactContent("progress", percent, "steps")}


def artifacts(client: SyncPrefectClient, flow_run: UUID) -> list[tuple[str | None, object]]:
    wanted = ArtifactFilter(flow_run_id=ArtifactFilterFlowRunId(any_=[flow_run]))
    return [(found.key, found.data) for found in client.read_artifacts(artifact_filter=wanted)]


def test_the_newest_picture_is_written_once_more_at_the_end_into_the_same_row(
    client: SyncPrefectClient, flow_run: UUID
) -> None:
    with PrefectLink(flow_run, lambda: None) as link:
        link.show(showing(10))
    assert artifacts(client, flow_run) == [("digits-1-progress", 10.0)]
    written = link._artifacts
    with PrefectLink(flow_run, lambda: None) as link:
        link._artifacts = written
        link.show(showing(20))
        link.show(showing(30))
    assert artifacts(client, flow_run) == [("digits-1-progress", 30.0)]


def test_a_cancelled_run_is_noticed_and_the_loop_is_woken(client: SyncPrefectClient, flow_run: UUID) -> None:
    woken = threading.Event()
    with PrefectLink(flow_run, woken.set) as link:
        assert not link.wants_stop()
        client.set_flow_run_state(flow_run, Cancelling(), force=True)
        assert woken.wait(20)
        assert link.wants_stop()
        assert not link.is_foreign()


def test_a_run_that_the_server_holds_for_crashed_is_foreign(
    client: SyncPrefectClient, flow_run: UUID
) -> None:
    from prefect.states import Crashed

    woken = threading.Event()
    with PrefectLink(flow_run, woken.set) as link:
        client.set_flow_run_state(flow_run, Crashed(), force=True)
        assert woken.wait(20)
        assert link.is_foreign()


def test_what_the_running_flow_is_sent_is_taken_once(client: SyncPrefectClient, flow_run: UUID) -> None:
    from flows.rescale import RescaleInput

    RescaleInput(target=3).send_to(flow_run, sender="a test")
    woken = threading.Event()
    with PrefectLink(flow_run, woken.set) as link:
        assert woken.wait(20)
        assert [Rescale.model_validate_json(sent) for sent in link.take_inputs()] == [Rescale(target=3)]
    assert client.filter_flow_run_input(flow_run, "", limit=10, exclude_keys=set()) == []


def test_a_broken_picture_is_told_and_does_not_pass_unseen(flow_run: UUID) -> None:
    def broken() -> Mapping[str, ArtifactContent]:
        raise ZeroDivisionError("no steps")

    with PrefectLink(flow_run, lambda: None) as link:
        link.show(broken)
    assert link.trouble() == "ZeroDivisionError: no steps"


def test_an_unknown_run_disturbs_nothing(prefect_server: None) -> None:
    with PrefectLink(uuid4(), lambda: None) as link:
        pass
    assert (link.wants_stop(), link.is_foreign(), link.trouble()) == (False, False, "")
