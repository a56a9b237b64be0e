"""The loop keeps what the job wants, passes on stops, and never acts once it is fenced."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import pytest

from elastic_core.cluster.provider import Instance, InstanceState, LaunchRequest, LaunchResult
from elastic_core.errors import InvalidRequest, ProviderError, ProviderUnavailable, QuotaExceeded
from elastic_core.ids import NodeId, RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.job import HealthPolicy, JobSpec, NodeBounds
from elastic_core.model.membership import Cause, Closed, Outcome, Stop, Target
from elastic_core.model.node import NodePhase
from elastic_core.planning import silence
from elastic_core.rescale.decision import Rescale
from elastic_core.store.keys import RunKeys
from elastic_core.testing.fake_provider import FakeProvider
from elastic_core.testing.memory_store import MemoryServer, MemoryStore
from flows import supervision as module
from flows.supervision import Fenced, Supervision
from tasks.agents import Attempt
from tasks.ownership import Ownership
from tasks.runs import RunDirectory
from tasks.watch import Observation
from tests.elastic_core.planning.test_failing import failure
from tests.elastic_core.planning.test_slowness import SLOW
from tests.flows.test_live import record
from tests.flows.test_news import entry

RUN = RunId("digits-1")
KEYS = RunKeys(RUN)
DONE = Closed(outcome=Outcome.SUCCEEDED, exit_code=0, reason="2 nodes finished generation 1")
JOB = JobSpec(nodes=NodeBounds(min=1, max=4, target=2))


class FakeCluster:
    """A cluster on a fake provider, its etcd never dying."""

    def __init__(self, provider: FakeProvider, directory: Path) -> None:
        self.keys = KEYS
        self.attempt = Attempt(job=JOB, directory=RunDirectory(directory / RUN), number=1, endpoint="x:1")
        self._provider = provider

    def launch(self, token: str, count: int) -> LaunchResult:
        return self._provider.launch(self.attempt.launch_request(token, count))

    def terminate(self, names: Collection[str]) -> None:
        self._provider.terminate(RUN, names)

    def instances(self) -> Sequence[Instance]:
        return self._provider.list_nodes(RUN)

    def tend(self) -> str:
        return ""

    def note_end(self) -> None:
        pass


@dataclass
class Steering:
    stop: str = ""
    foreign: bool = False
    asked: list[Rescale] = field(default_factory=list)

    def wishes(self) -> list[Rescale]:
        taken, self.asked = self.asked, []
        return taken

    def stop_reason(self) -> str:
        return self.stop

    def is_foreign(self) -> bool:
        return self.foreign


@dataclass
class Stage:
    """A supervision with a script: the next act is played when the loop shows the run."""

    supervision: Supervision
    ownership: Ownership
    store: MemoryStore
    provider: FakeProvider
    said: list[str]
    acts: list[Callable[[Observation], bool]]
    steering: Steering = field(default_factory=Steering)

    def run(self) -> Closed:
        return self.supervision.until_closed(self.steering, self.ownership)

    def close(self, closed: Closed = DONE) -> None:
        self.store.put(KEYS.closed, encode(closed))

    def running(self) -> list[str]:
        nodes = self.provider.list_nodes(RUN)
        return [node.name for node in nodes if node.state is InstanceState.RUNNING]


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setattr(module, "TICK_S", 0.01)
    store, provider = MemoryStore(MemoryServer()), FakeProvider()
    said: list[str] = []
    acts: list[Callable[[Observation], bool]] = []

    def show(seen: Observation) -> None:
        if acts and acts[0](seen):
            acts.pop(0)

    with ExitStack() as stack:
        cluster = FakeCluster(provider, tmp_path)
        supervision = Supervision(cluster, store, say=said.append, show=show)  # type: ignore[arg-type]
        stack.enter_context(supervision)
        ownership = Ownership(store, KEYS, owner="test", lost=supervision.wake)
        stack.enter_context(ownership)
        yield Stage(supervision, ownership, store, provider, said, acts)


def when(fact: Callable[[Observation], bool], do: Callable[[], None]) -> Callable[[Observation], bool]:
    def act(seen: Observation) -> bool:
        if not fact(seen):
            return False
        do()
        return True

    return act


def alive(count: int) -> Callable[[Observation], bool]:
    def fact(seen: Observation) -> bool:
        return sum(node.state is InstanceState.RUNNING for node in seen.instances) == count

    return fact


def test_the_wanted_nodes_are_launched_the_target_is_written_and_the_end_returned(stage: Stage) -> None:
    stage.acts.append(when(alive(2), stage.close))
    assert stage.run() == DONE
    assert stage.running() == ["node-1", "node-2"]
    target = stage.store.read(KEYS.target)
    assert target is not None
    assert decode(Target, target.value) == Target(nodes=2)


def test_a_lost_node_is_replaced_once(stage: Stage) -> None:
    stage.acts += [
        when(alive(2), lambda: stage.provider.end(RUN, "node-1", detail="was killed")),
        when(alive(1), lambda: None),
        when(alive(2), stage.close),
    ]
    stage.run()
    assert stage.running() == ["node-2", "node-3"]
    assert [request.count for request in stage.provider.requests] == [2, 1]


@pytest.mark.case("D09")
def test_a_node_that_runs_and_was_silent_for_long_is_ended_and_replaced(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(silence, "SILENT_S", 0.0)
    seats = [stage.store.grant(60), stage.store.grant(60)]

    def come() -> None:
        for number, lease in enumerate(seats, start=1):
            node = record(f"node-{number}.a", NodePhase.READY)
            stage.store.put(KEYS.node(node.node_id), encode(node), lease)

    def is_heard(seen: Observation) -> bool:
        return len(seen.nodes) == 2 and len(stage.supervision._silence.heard) == 2

    stage.acts += [
        when(alive(2), come),
        when(is_heard, lambda: stage.store.revoke(seats[0])),
        when(lambda _: "node-3" in stage.running(), stage.close),
    ]
    assert stage.run() == DONE
    assert stage.running() == ["node-2", "node-3"]
    assert "ending node-1: it runs, and its agent is silent for 0 s" in stage.said


def test_a_target_that_somebody_else_set_is_followed(stage: Stage) -> None:
    stage.acts += [
        when(alive(2), lambda: stage.store.put(KEYS.target, encode(Target(nodes=3))) and None),
        when(alive(3), stage.close),
    ]
    stage.run()
    assert stage.running() == ["node-1", "node-2", "node-3"]


def test_a_size_that_the_running_flow_is_sent_is_written_and_followed(stage: Stage) -> None:
    stage.acts += [
        when(alive(2), lambda: stage.steering.asked.append(Rescale(target=3))),
        when(alive(3), lambda: stage.steering.asked.append(Rescale(target=9))),
        when(lambda _: "choose one from 1 to 4" in stage.said[-1], stage.close),
    ]
    stage.run()
    target = stage.store.read(KEYS.target)
    assert target is not None
    assert decode(Target, target.value) == Target(nodes=3, least=1, most=4)
    assert stage.said[-1] == (
        "a rescale was refused: target is 9: choose one from 1 to 4, the job's own bounds"
    )
    assert "rescale: the target goes from 2 to 3 nodes (from 1 to 4)" in stage.said


def test_what_ended_before_is_history_and_does_not_slow_the_first_launch(
    tmp_path: Path, stage: Stage
) -> None:
    provider = FakeProvider()
    cluster = FakeCluster(provider, tmp_path)
    cluster.launch("earlier", 2)
    for name in ("node-1", "node-2"):
        provider.end(RUN, name, exit_code=75)
    said: list[str] = []
    with Supervision(
        cluster,  # type: ignore[arg-type]
        stage.store,
        say=said.append,
        show=lambda seen: stage.close() if alive(2)(seen) else None,
    ) as supervision:
        supervision.until_closed(Steering(), stage.ownership)
    assert said == ["launching 2 nodes: 2 nodes more, to have 2"]


@pytest.mark.parametrize("kind", [InvalidRequest, QuotaExceeded])
def test_a_launch_that_can_never_succeed_ends_a_run_without_nodes(
    stage: Stage, kind: type[ProviderError]
) -> None:
    def refuse(request: LaunchRequest) -> LaunchResult:
        raise kind("not like this")

    stage.provider.launch = refuse  # type: ignore[method-assign]
    with pytest.raises(kind, match="not like this"):
        stage.run()


def test_a_launch_that_can_never_succeed_ends_no_training(stage: Stage) -> None:
    def refuse(request: LaunchRequest) -> LaunchResult:
        raise QuotaExceeded("32 vCPU is the limit")

    def lose_one() -> None:
        stage.provider.launch = refuse  # type: ignore[method-assign]
        stage.provider.end(RUN, "node-1", detail="was killed")

    def is_told(seen: Observation) -> bool:
        return any("32 vCPU is the limit" in sentence for sentence in stage.said)

    stage.acts += [when(alive(2), lose_one), when(is_told, stage.close)]
    assert stage.run() == DONE
    assert stage.running() == ["node-2"]


def test_a_call_without_an_answer_is_repeated_with_its_token(stage: Stage) -> None:
    stage.acts += [
        when(lambda seen: True, lambda: stage.provider.faults.extend([])),
        when(alive(2), stage.close),
    ]
    lost = ProviderUnavailable("no answer")
    launch, calls = stage.provider.launch, []

    def losing_the_first_answer(request):
        calls.append(request.token)
        result = launch(request)
        if len(calls) == 1:
            raise lost
        return result

    stage.provider.launch = losing_the_first_answer  # type: ignore[method-assign]
    stage.run()
    assert stage.running() == ["node-1", "node-2"]
    assert "no answer from the provider: no answer" in stage.said
    assert len(set(calls)) == 1


def test_agents_that_refuse_their_input_end_the_run_with_their_code(stage: Stage) -> None:
    def refuse() -> None:
        for name in ("node-1", "node-2"):
            stage.provider.end(RUN, name, exit_code=2)

    stage.acts.append(when(alive(2), refuse))
    closed = stage.run()
    assert (closed.outcome, closed.exit_code) == (Outcome.FAILED, 2)
    assert "refused its input" in closed.reason


def test_a_cancelled_flow_asks_the_agents_to_stop_and_returns_their_word(stage: Stage) -> None:
    stopped = Closed(outcome=Outcome.PREEMPTED, exit_code=75, reason="saved at step 41")

    def is_asked(seen: Observation) -> bool:
        return seen.stop == Stop(reason="the flow run was cancelled")

    stage.acts += [
        when(alive(2), lambda: setattr(stage.steering, "stop", "the flow run was cancelled")),
        when(is_asked, lambda: stage.close(stopped)),
    ]
    assert stage.run() == stopped


def test_agents_that_do_not_stop_are_waited_for_until_the_deadline_only(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_DEADLINE_S", 0.1)
    stage.acts.append(when(alive(2), lambda: setattr(stage.steering, "stop", "asked")))
    closed = stage.run()
    assert (closed.outcome, closed.exit_code) == (Outcome.PREEMPTED, 75)
    assert stage.running() == ["node-1", "node-2"]


def test_a_second_signal_ends_the_wait_for_the_saved_state(stage: Stage) -> None:
    stage.acts += [
        when(alive(2), lambda: setattr(stage.steering, "stop", "asked")),
        when(lambda seen: seen.stop is not None, stage.supervision.hear_signal),
    ]
    assert stage.run().outcome is Outcome.PREEMPTED  # after 8 s without the second signal


def test_the_time_limit_stops_the_run(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STOP_DEADLINE_S", 0.1)
    closed = stage.supervision.until_closed(stage.steering, stage.ownership, 0.0)
    assert (closed.exit_code, closed.reason) == (75, "stopped: the time limit was reached")


def test_a_run_that_the_server_holds_for_ended_is_left_as_it_is(stage: Stage) -> None:
    stage.acts.append(when(alive(2), lambda: setattr(stage.steering, "foreign", True)))
    with pytest.raises(Fenced):
        stage.run()
    assert stage.running() == ["node-1", "node-2"]
    assert stage.store.read(KEYS.stop) is None


def test_a_flow_whose_run_another_one_drives_stops_acting(stage: Stage) -> None:
    def take_over() -> None:
        owner = stage.store.read(KEYS.owner)
        assert owner is not None
        stage.store.put(KEYS.owner, b"another flow", stage.store.grant(60))
        stage.store.revoke(owner.lease)

    stage.acts.append(when(alive(2), take_over))
    with pytest.raises(Fenced):
        stage.run()
    assert stage.running() == ["node-1", "node-2"]


def test_ended_agents_are_not_waited_for(stage: Stage) -> None:
    stage.acts.append(when(alive(2), stage.close))
    stage.run()
    for name in stage.running():
        stage.provider.end(RUN, name, exit_code=0)
    assert [node.exit_code for node in stage.supervision.wait_left().instances] == [0, 0]


def seat(stage: Stage, *nodes: str) -> None:
    """Let these nodes be registered and form the current generation."""
    for node in nodes:
        stage.store.put(KEYS.node(NodeId(node)), encode(record(node, NodePhase.READY)))
    stage.store.put(KEYS.history_entry(1), encode(entry(1, Cause.START, *nodes)))


@pytest.mark.parametrize("policy", ["warn", "replace"])
def test_a_slow_node_is_told_of_and_drained_where_the_job_wants_it_replaced(
    stage: Stage, policy: Literal["warn", "replace"]
) -> None:
    health = HealthPolicy(slow_node=policy)
    cluster = stage.supervision._cluster
    cluster.attempt = replace(cluster.attempt, job=JOB.model_copy(update={"health": health}))
    drain = KEYS.drain(SLOW.node_id)

    def slow_down() -> None:
        seat(stage, "a.1", "b.1", "c.1")
        stage.store.put(KEYS.slow_worker(SLOW.node_id, 0), encode(SLOW))

    def is_answered(seen: Observation) -> bool:
        is_drained = stage.store.read(drain) is not None
        return SLOW.headline() in stage.said and is_drained == (policy == "replace")

    stage.acts += [when(alive(2), slow_down), when(is_answered, stage.close)]
    stage.run()
    found = stage.store.read(drain)
    assert (found.value.decode() if found else "") == (SLOW.headline() if policy == "replace" else "")
    assert stage.said.count(SLOW.headline()) == 1
    drained = [said for said in stage.said if said.startswith("draining b.1: rank 1 on node b.1 is slow")]
    assert len(drained) == (policy == "replace")


def test_a_node_on_which_every_failure_began_is_drained(stage: Stage) -> None:
    def fail_twice() -> None:
        seat(stage, "a.1", "b.1")
        for number in (1, 2):
            stage.store.put(KEYS.failure(number, NodeId("b.1")), encode(failure(number)))

    drain = KEYS.drain(NodeId("b.1"))
    stage.acts += [
        when(alive(2), fail_twice),
        when(lambda _: stage.store.read(drain) is not None, stage.close),
    ]
    stage.run()
    assert stage.said[-1] == "draining b.1: the last 2 failures all began on b (ValueError: bad label 7)"
