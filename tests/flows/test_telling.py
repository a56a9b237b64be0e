"""What happens to a run arrives at a real Prefect server as events, and telling never holds up the loop."""

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.model.job import AwsPool, JobSpec
from elastic_core.model.membership import Cause, Closed, Outcome, Target
from flows.audience import RunSnapshot
from flows.telling import MOST, WINDOW_S, EventTeller, Gate
from tasks.watch import Observation
from tests.flows.test_live import progress, snapshot
from tests.flows.test_news import FIRST, SECOND, THIRD, entry

RUN = "digits-1"


def test_beyond_the_limit_events_are_counted_instead_of_sent() -> None:
    gate = Gate(2)
    assert [gate.lets_through(at) for at in (0, 1, 2, 3, WINDOW_S)] == [True, True, False, False, True]
    assert (gate.take_left_out(), gate.take_left_out()) == (2, 0)


def test_a_storm_is_told_in_part_and_the_next_event_says_how_many_are_missing(
    tmp_path: Path,
) -> None:
    sent: list[tuple[str, dict[str, Any]]] = []
    now = [0.0]
    teller = EventTeller(lambda name, _, payload: sent.append((name, payload)), clock=lambda: now[0])
    base = snapshot(tmp_path, None)
    history = tuple(entry(number, Cause.LOSS, "a.1") for number in range(1, MOST + 11))
    teller.tell(replace(base, observation=Observation(history=history)))
    now[0] = WINDOW_S
    more = (*history, entry(len(history) + 1, Cause.LOSS, "a.1"))
    teller.tell(replace(base, observation=Observation(history=more)))
    formed = [payload for name, payload in sent if name == "elastic.generation.formed"]
    assert len(formed) == MOST + 1
    assert [payload.get("left_out") for payload in formed[-2:]] == [None, 10]


def story(base: RunSnapshot) -> Iterator[RunSnapshot]:
    """Yield a run that lives through everything that is told."""
    seen = Observation(history=(FIRST,), target=Target(nodes=2), progress=progress(60))
    yield replace(base, observation=seen)
    seen = replace(
        seen, instances=(Instance(name="b", state=InstanceState.STOPPING, detail="spot interruption"),)
    )
    yield replace(base, observation=seen)
    seen = replace(seen, history=(FIRST, SECOND), progress=replace(progress(80), durable_step=70))
    yield replace(base, observation=seen)
    seen = replace(seen, history=(FIRST, SECOND, THIRD), target=Target(nodes=3))
    yield replace(
        base, observation=replace(seen, progress=replace(progress(90), trouble="disk full", durable_step=70))
    )
    closed = Closed(outcome=Outcome.FAILED, exit_code=1, reason="ValueError: bad label 7")
    yield replace(base, observation=replace(seen, closed=closed))


def paid(base: RunSnapshot, usd: float) -> RunSnapshot:
    """Return the run on machines that have cost so much."""
    machine = {"machine": "b", "kind": "g5", "market": "spot", "usd_per_hour": usd, "launched_at": 0}
    lines = [machine, {"machine": "b", "ended_at": 3600}]
    (base.attempt.directory.path / "costs.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    job = JobSpec(pool=AwsPool(budget_usd=10))
    return replace(base, attempt=replace(base.attempt, job=job))


EXPECTED = {
    "elastic.budget.reached": {"percent": 80, "spent_usd": 8.5, "budget_usd": 10},
    "elastic.checkpoint.failed": {"step": 90, "why": "disk full"},
    "elastic.checkpoint.written": {"step": 70},
    "elastic.generation.formed": {"number": 3, "cause": "join", "nodes": 2},
    "elastic.node.joined": {"node": "c"},
    "elastic.node.lost": {"node": "b", "how": "silent for 0.3 s"},
    "elastic.node.notice": {"node": "b", "notice": "spot interruption"},
    "elastic.run.ended": {"outcome": "failed", "reason": "ValueError: bad label 7"},
    "elastic.run.rescaled": {"from": 2, "to": 3},
}
"""The last event of each name."""


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_all_events_of_a_run_are_on_the_server_with_resource_payload_and_flow_run(tmp_path: Path) -> None:
    from prefect import flow
    from prefect.context import FlowRunContext

    from flows.metrics import RunMetrics
    from flows.side import FlowSide
    from flows.signals import StopSignals

    base = paid(snapshot(tmp_path, None), 8.5)

    @flow(name="told")
    def told() -> UUID:
        with FlowSide(StopSignals(), RunMetrics()) as side:
            for each in story(base):
                side.show(each)
        context = FlowRunContext.get()
        assert context is not None
        assert context.flow_run is not None
        return context.flow_run.id

    flow_run = told()
    events = arrived(RUN, "elastic.run.ended")
    assert {each["event"]: each["payload"] for each in events} == EXPECTED
    assert {each["resource"]["prefect.resource.name"] for each in events} == {RUN}
    related = {one["prefect.resource.id"] for each in events for one in each["related"]}
    assert f"prefect.flow-run.{flow_run}" in related


def arrived(run: str, last: str) -> list[dict[str, Any]]:
    """Return all events of a run in their order, once the last one is there."""
    from prefect.client.orchestration import get_client

    wanted = {"filter": {"resource": {"id": [f"elastic.run.{run}"]}, "order": "ASC"}, "limit": 50}
    until = time.monotonic() + 30
    with get_client(sync_client=True) as client:
        while time.monotonic() < until:
            found: list[dict[str, Any]] = client.request("POST", "/events/filter", json=wanted).json()[
                "events"
            ]
            if any(each["event"] == last for each in found):
                return found
            threading.Event().wait(0.2)  # the server tells nobody: it is asked again
    raise AssertionError(f"{last} did not arrive")
