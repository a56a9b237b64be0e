"""What notices mean, as a pure decision."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from elastic_core.agent.notices import Notice, NoticeKind, read_interruption, read_rebalance

NOON = datetime(2026, 1, 31, 12, 0, 0, tzinfo=UTC)


@pytest.mark.case("G06")
def test_an_interruption_says_what_happens_when_and_how_long_that_is() -> None:
    notice = read_interruption('{"action": "terminate", "time": "2026-01-31T12:02:00Z"}', NOON)
    assert notice == Notice(
        kind=NoticeKind.INTERRUPTION,
        text="spot interruption: terminate at 12:02:00 UTC",
        seconds_left=120.0,
    )
    assert notice.out_within_s() == 118.0


@pytest.mark.parametrize("body", ["", "[]", "null", '{"action": "stop"}', '{"action": "stop", "time": 3}'])
def test_an_interruption_that_cannot_be_read_is_one_nevertheless(body: str) -> None:
    notice = read_interruption(body, NOON)
    assert (notice.kind, notice.seconds_left, notice.out_within_s()) == (NoticeKind.INTERRUPTION, None, None)


@pytest.mark.case("G07")
@pytest.mark.parametrize(
    ("leave_before", "waited"), [(0, 0.0), (30, 90.0), (119, 1.0), (120, 0.0), (600, 0.0)]
)
def test_a_node_leaves_at_once_or_uses_the_time_as_declared(leave_before: float, waited: float) -> None:
    notice = read_interruption('{"action": "terminate", "time": "2026-01-31T12:02:00Z"}', NOON)
    assert notice.wait_s(leave_before) == waited


@pytest.mark.case("G07")
def test_where_nobody_says_when_the_node_leaves_at_once() -> None:
    assert read_rebalance().wait_s(leave_before=30) == 0.0
