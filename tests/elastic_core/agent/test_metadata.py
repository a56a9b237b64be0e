"""The metadata service over real HTTP: tokens, silence, illness, and notices."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_core.agent.metadata import MetadataService, MetadataUnavailable, NoticeWatch
from elastic_core.agent.notices import Notice, NoticeKind, NoticeSource
from tests.elastic_core.agent.metadata_service import INTERRUPTION, REBALANCE, MetadataDouble

TOKEN = "PUT /latest/api/token"
WAIT_S = 30.0


@pytest.fixture
def imds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MetadataDouble]:
    with MetadataDouble(tmp_path, monkeypatch) as service:
        yield service


class Watching:
    """A watch at work, and what it told."""

    def __init__(self, endpoint: str, leave_before: float = 0.0) -> None:
        self.told: queue.SimpleQueue[Notice] = queue.SimpleQueue()
        source = NoticeSource(endpoint=endpoint, leave_before=leave_before, period=0.02)
        self._watch = NoticeWatch(source, self.told.put)

    def __enter__(self) -> queue.SimpleQueue[Notice]:
        return self.told

    def __exit__(self, *_: object) -> None:
        self._watch.close()


@pytest.mark.case("G08")
def test_one_token_serves_all_questions_and_is_renewed_when_it_ended(imds: MetadataDouble) -> None:
    imds.say({"instance-id": "i-1"})
    service = MetadataService(imds.endpoint)
    for _ in range(3):
        answer = service.get("/latest/meta-data/instance-id")
        assert answer is not None
        assert answer.body == "i-1"
    assert imds.wait_asked(1, TOKEN) == 1
    imds.forget_tokens()
    assert service.get("/latest/meta-data/instance-id") is not None
    assert imds.wait_asked(2, TOKEN) == 2


def test_nothing_there_is_an_answer_and_no_error(imds: MetadataDouble) -> None:
    assert MetadataService(imds.endpoint).get(f"/latest/meta-data/{INTERRUPTION}") is None


def test_a_service_that_does_not_answer_costs_its_timeout_and_is_named(imds: MetadataDouble) -> None:
    imds.fall_silent()
    began = time.monotonic()
    with pytest.raises(MetadataUnavailable, match=f"{imds.endpoint} does not answer"):
        MetadataService(imds.endpoint, timeout_s=0.1).get("/latest/meta-data/instance-id")
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("status", [400, 403, 500, 503])
def test_an_answer_that_means_nothing_is_no_notice(imds: MetadataDouble, status: int) -> None:
    imds.be_ill(status)
    with pytest.raises(MetadataUnavailable, match=str(status)):
        MetadataService(imds.endpoint).get("/latest/meta-data/instance-id")


@pytest.mark.case("G06")
def test_an_interruption_is_told_once_after_any_number_of_404(imds: MetadataDouble) -> None:
    with Watching(imds.endpoint) as told:
        imds.wait_asked(3, INTERRUPTION)
        assert told.empty()
        imds.interrupt(120)
        notice = told.get(timeout=WAIT_S)
        assert notice.kind is NoticeKind.INTERRUPTION
        assert notice.seconds_left is not None
        assert 60 < notice.seconds_left <= 120
    assert told.empty()


def test_a_rebalance_recommendation_is_told(imds: MetadataDouble) -> None:
    imds.say({REBALANCE: '{"noticeTime": "2026-01-31T12:00:00Z"}'})
    with Watching(imds.endpoint) as told:
        assert told.get(timeout=WAIT_S).kind is NoticeKind.REBALANCE


@pytest.mark.case("G06")
@pytest.mark.case("G08")
def test_an_ill_service_is_told_once_and_heard_again_when_it_is_well(
    imds: MetadataDouble, capsys: pytest.CaptureFixture[str]
) -> None:
    imds.be_ill(500)
    with Watching(imds.endpoint) as told:
        imds.wait_asked(4, TOKEN)
        imds.be_ill(0)
        imds.interrupt(120)
        told.get(timeout=WAIT_S)
    out = capsys.readouterr().out
    assert (out.count("no spot notices"), out.count("can be heard again")) == (1, 1)


@pytest.mark.case("G07")
def test_a_node_that_uses_the_time_is_told_when_the_declared_rest_is_left(imds: MetadataDouble) -> None:
    imds.interrupt(4)
    with Watching(imds.endpoint, leave_before=2) as told:
        notice = told.get(timeout=WAIT_S)
    assert notice.seconds_left is not None
    assert notice.seconds_left <= 2


def test_a_watch_ends_at_once_though_the_service_is_silent(imds: MetadataDouble) -> None:
    imds.fall_silent()
    with Watching(imds.endpoint):
        imds.wait_asked(1)
        began = time.monotonic()
    assert time.monotonic() - began < 0.9
