"""A node that runs and is silent is ended after a while; one that is heard again is not."""

import pytest

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.planning.silence import SILENT_S, Silence

BOOT_S = 600.0
RUNNING = Instance(name="node-1", state=InstanceState.RUNNING)


def ends(silence: Silence, now: float) -> list[tuple[tuple[str, ...], str]]:
    return [(end.names, end.reason) for end in silence.overdue(now, boot_s=BOOT_S)]


@pytest.mark.case("D09")
def test_a_node_whose_agent_falls_silent_is_ended_though_its_provider_calls_it_running() -> None:
    silence = Silence().noticed([RUNNING], {"node-1"}, 0.0).noticed([RUNNING], set(), 10.0)
    assert ends(silence.noticed([RUNNING], set(), 9.9 + SILENT_S), 9.9 + SILENT_S) == []
    assert ends(silence.noticed([RUNNING], set(), 10.0 + SILENT_S), 10.0 + SILENT_S) == [
        (("node-1",), "it runs, and its agent is silent for 180 s")
    ]


def test_an_agent_that_never_came_has_the_time_to_boot() -> None:
    silence = Silence().noticed([RUNNING], set(), 5.0)
    assert ends(silence, 5.0 + SILENT_S) == []
    assert ends(silence, 5.0 + BOOT_S) == [(("node-1",), "it runs, and its agent never came for 600 s")]


def test_one_that_is_heard_again_begins_anew() -> None:
    silence = Silence().noticed([RUNNING], {"node-1"}, 0.0).noticed([RUNNING], set(), 10.0)
    silence = silence.noticed([RUNNING], {"node-1"}, 20.0).noticed([RUNNING], set(), 30.0)
    assert ends(silence, 10.0 + SILENT_S) == []
    assert ends(silence, 30.0 + SILENT_S) != []


@pytest.mark.parametrize("state", [InstanceState.PENDING, InstanceState.STOPPING, InstanceState.ENDED])
def test_only_what_runs_can_be_silent(state: InstanceState) -> None:
    silence = Silence().noticed([RUNNING], {"node-1"}, 0.0)
    silence = silence.noticed([Instance(name="node-1", state=state)], set(), 1.0)
    assert (dict(silence.since), silence.heard) == ({}, frozenset())
