"""The property suite: three drivers that do anything to a simulated run and check the protocol.

`FreeTicks` rings the timer whenever it likes, `WakeOnly` lets time move only to what was asked
for (so that a lost wake-up is a hang), `BoundedWait` disturbs a quiet run once and holds it to
the bound of that disturbance. Safety (S1 to S5, S7 to S10) is judged by `Witness` at each command.
"""

import functools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastic_core.ids import NodeId
from elastic_core.model.membership import Cause, Outcome
from elastic_core.model.node import NodePhase
from elastic_core.model.sizes import ALL_SIZES, AllowedSizes
from elastic_core.rendezvous.events import CoordinatorPolicy
from elastic_core.testing.invariants import InvariantViolated
from elastic_core.testing.simulated_store import CommitFault
from elastic_core.testing.simulator import Simulator

NIGHTLY = os.environ.get("ELASTIC_NIGHTLY", "") == "1"

SETTINGS = settings(
    max_examples=int(os.environ.get("ELASTIC_EXAMPLES", "2000" if NIGHTLY else "40")),
    stateful_step_count=60 if NIGHTLY else 40,
    # Shrinking takes minutes on a busy machine; the printed blob reproduces the run without it.
    phases=tuple(Phase) if NIGHTLY else (Phase.explicit, Phase.generate),
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)

POLICY = CoordinatorPolicy(
    min_nodes=1,
    max_nodes=4,
    last_call=2.0,
    join_timeout=60.0,
    probe_timeout=0.3,
    max_restarts=3,
    no_progress_limit=3,
    stop_timeout=20.0,
)
SIZES = [ALL_SIZES, AllowedSizes(multiple_of=2), AllowedSizes(listed=(1, 3))]
QUIET = 40.0
"""Longest time to settle after the last fault: several losses, elections and last calls in a row."""

RESTING = re.compile(
    r"generation \d+ (trains|is being written)|.* finished generation|closing|the run is closed"
)
"""Reasons that wait for a named event, so that no timer need be set."""

PICK = st.integers(0, 11)


class RunMachine(RuleBasedStateMachine):
    """One simulated run with its faults; subclasses say how time passes."""

    def __init__(self) -> None:
        super().__init__()
        self.sim = Simulator(POLICY)
        self.was_stopped = False
        self.was_finished = False
        self.lost_packets = False

    def begin(self, policy: CoordinatorPolicy, seed: int, nodes: int, elastic: bool) -> None:
        self.sim = Simulator(policy, seed=seed, elastic=elastic)
        for index in range(nodes):
            self.sim.add_node(slots=1 + index % 3)

    def living(self) -> list[NodeId]:
        return [node for node in self.sim.store.nodes if not self.sim.is_down(node)]

    def pick(self, number: int) -> NodeId | None:
        living = self.living()
        return living[number % len(living)] if living else None

    def ready(self) -> list[NodeId]:
        phases = {node: self.sim.nodes[node].record.phase for node in self.living()}
        return [node for node, phase in phases.items() if phase is NodePhase.READY]

    def sizes(self) -> list[int]:
        """Allowed sizes, found without the code under test."""
        policy = self.sim.policy
        listed, step = policy.sizes.listed, policy.sizes.multiple_of
        bounds = range(policy.min_nodes, policy.max_nodes + 1)
        return [size for size in bounds if size % step == 0 and (not listed or size in listed)]

    def wanted(self) -> int:
        """Members that the run must have once all is quiet."""
        target, ready = self.sim.store.target, len(self.ready())
        most = max(target.nodes, self.sizes()[0]) if target else self.sim.policy.max_nodes
        return max(size for size in self.sizes() if size <= min(most, ready))

    def story(self) -> str:
        entries = [
            f"{entry.generation.number} {entry.generation.cause} {[m.node_id for m in entry.members]}"
            for entry in self.sim.history[-6:]
        ]
        return f"t={self.sim.now:.3f} {self.sim.host.reason!r} {entries} closed={self.sim.closed}"

    def require(self, name: str, is_true: object, problem: str) -> None:
        if not is_true:
            raise InvariantViolated(name, f"{problem}; {self.story()}")


THEN = st.sampled_from([0.0, 0.001, 0.005, 0.05, 0.3, 1.0, 4.0])
"""Time that passes after a fault: from the midst of its detection to long after it."""


def fault(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Any]:
    """Make a rule of a fault, after which some time passes."""

    def decorate(act: Callable[..., None]) -> Any:
        @functools.wraps(act)
        def act_and_wait(self: "Faults", then: float, **arguments: Any) -> None:
            act(self, **arguments)
            self.pass_time(then)

        return rule(then=THEN, **strategies)(act_and_wait)

    return decorate


class Faults(RunMachine):
    """Everything that can happen to a run, at any time."""

    @initialize(
        bounds=st.tuples(st.integers(1, 3), st.integers(0, 3)),
        sizes=st.sampled_from(SIZES),
        restarts=st.integers(0, 3),
        seed=st.integers(0, 1_000),
        nodes=st.integers(0, 5),
        elastic=st.booleans(),
        is_formed=st.sampled_from([True, True, False]),
    )
    def start(
        self,
        bounds: tuple[int, int],
        sizes: AllowedSizes,
        restarts: int,
        seed: int,
        nodes: int,
        elastic: bool,
        is_formed: bool,
    ) -> None:
        least, most = bounds[0], bounds[0] + bounds[1]
        is_possible = least <= sizes.largest_within(most)
        policy = replace(POLICY, min_nodes=least, max_nodes=most, max_restarts=restarts)
        policy = replace(policy, sizes=sizes if is_possible else ALL_SIZES)
        self.begin(policy, seed, nodes, elastic)
        self.pass_time(4.0 if is_formed else 0.0)

    @fault(slots=st.integers(1, 3))
    def join(self, slots: int) -> None:
        if len(self.living()) < 8:
            self.sim.add_node(slots=slots)

    @fault(nodes=st.integers(3, 6))
    def replenish(self, nodes: int) -> None:
        for _ in range(nodes - len(self.living())):
            self.sim.add_node()

    @fault(number=PICK)
    def kill(self, number: int) -> None:
        if (node := self.pick(number)) is not None:
            self.sim.kill(node)

    @fault(numbers=st.lists(PICK, min_size=2, max_size=5))
    def kill_many(self, numbers: list[int]) -> None:
        for number in numbers:
            if (node := self.pick(number)) is not None:
                self.sim.kill(node)

    @fault(number=PICK)
    def freeze(self, number: int) -> None:
        if (node := self.pick(number)) is not None:
            self.sim.freeze(node)

    @fault(number=PICK)
    def thaw(self, number: int) -> None:
        frozen = [n for n, node in self.sim.nodes.items() if node.down_since is not None and not node.is_dead]
        if frozen:
            self.sim.thaw(frozen[number % len(frozen)])

    @fault(seconds=st.sampled_from([0.12, 0.35, 0.65]), is_asking=st.booleans())
    def stall_coordinator(self, seconds: float, is_asking: bool) -> None:
        """Its node stands still for a moment: what came in lies behind the timer that is overdue.

        The worst moment is while it asks for signs of life, so that moment is looked for.
        """
        for _ in range(200 * is_asking):
            if "sign of life" in self.sim.host.reason:
                break
            self.sim.step()
        leader = self.sim.host.leader
        if leader is not None and not self.sim.is_down(leader):
            self.sim.freeze(leader)
            self.pass_time(seconds)
            self.sim.thaw(leader)

    @fault(
        number=PICK,
        started=st.sampled_from([True, True, True, False]),
        code=st.sampled_from([1, 137]),
        late=st.sampled_from([0.0, 0.01, 0.35]),
    )
    def fail_worker(self, number: int, started: bool, code: int, late: float) -> None:
        if (node := self.pick(number)) is not None:
            self.sim.fail_worker(node, exit_code=code, started=started, report_after=late)

    @fault(number=PICK)
    def drain(self, number: int) -> None:
        if (node := self.pick(number)) is not None:
            self.sim.drain(node)

    @fault(wait=st.sampled_from([0.01, 0.3, 0.6, 1.5]), slots=st.integers(1, 2))
    def flap(self, wait: float, slots: int) -> None:
        """Join and be lost within the settling time: what broke others."""
        node = self.sim.add_node(slots=slots)
        self.pass_time(wait)
        if not self.sim.is_down(node):
            self.sim.kill(node)

    @fault(nodes=st.integers(0, 6))
    def retarget(self, nodes: int) -> None:
        self.sim.set_target(nodes)

    @fault(fault=st.sampled_from(list(CommitFault)))
    def fail_next_commit(self, fault: CommitFault) -> None:
        self.sim.host.commit_faults.append(fault)

    @precondition(lambda self: not self.lost_packets)
    @fault(packets=st.integers(1, 2))
    def lose_probes(self, packets: int) -> None:
        """Fewer packets than the rounds of one inquiry: they must evict nobody."""
        self.lost_packets = True
        self.sim.host.lost_probes = packets

    @fault()
    def forget_coordinator(self) -> None:
        self.sim.host.forget()

    @fault(chance=st.integers(0, 4), pause=st.sampled_from([0.01, 0.5, 3.0]), newcomers=st.integers(0, 1))
    def finish(self, chance: int, pause: float, newcomers: int) -> None:
        """The job ends, now and then while a node that will not be needed sets itself up."""
        if chance == 0 and self.sim.members:
            self.was_finished = True
            for _ in range(newcomers):
                self.sim.add_node()
            self.sim.finish(pause)

    @fault(chance=st.integers(0, 9))
    def stop(self, chance: int) -> None:
        if chance == 0:
            self.was_stopped = True
            self.sim.stop("asked to")

    def pass_time(self, seconds: float) -> None:
        self.sim.run(seconds)

    def teardown(self) -> None:
        """Let all faults end: within a bound the run must train, wait for nodes, or be closed."""
        sim = self.sim
        if sim.host.violation is not None:
            return
        sim.host.commit_faults.clear()
        for node_id, node in list(sim.nodes.items()):
            if node.down_since is not None and not node.is_dead:
                sim.thaw(node_id)
        sim.run(QUIET)
        note(self.story())
        if sim.closed is not None:
            self.check_outcome()
        elif len(self.ready()) < self.sizes()[0] or not self.living():
            self.check_patience()
        else:
            self.check_training()

    def check_outcome(self) -> None:
        assert self.sim.closed is not None
        outcome = self.sim.closed.outcome
        failures = sum(entry.generation.cause is Cause.FAILURE for entry in self.sim.history)
        allowed = {
            Outcome.SUCCEEDED: self.was_finished,
            Outcome.PREEMPTED: self.was_stopped,
            Outcome.NO_PROGRESS: failures >= self.sim.policy.no_progress_limit - 1,
        }
        self.require("S10", allowed.get(outcome, True), f"{outcome} without a cause")

    def check_patience(self) -> None:
        if self.living():
            self.require("L2", self.sim.host.wake_at is not None, "it waits for nodes without a wake-up")

    def check_training(self) -> None:
        sim = self.sim
        wanted = self.wanted()
        self.require("L1", not self.was_stopped, "a stop did not end the run")
        self.require("L1", len(sim.members) == wanted, f"{len(sim.members)} of {wanted} members")
        self.require("L3", set(sim.members) <= set(self.ready()), "a member is lost")
        self.require("L1", sim.is_training, "nothing trains")


class FreeTicks(Faults):
    """Time passes freely, and the timer rings whenever it likes."""

    @rule(seconds=st.sampled_from([0.001, 0.01, 0.1, 0.5, 2.0, 4.0]), ticks=st.integers(1, 4))
    def wait(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.sim.run(seconds / ticks)
            self.sim.host.tick()


class WakeOnly(Faults):
    """The timer rings only when it was asked to."""

    @rule(things=st.integers(1, 30))
    def wait(self, things: int) -> None:
        for _ in range(things):
            self.sim.step()

    @rule(seconds=st.sampled_from([0.001, 0.3, 4.0]))
    def wait_long(self, seconds: float) -> None:
        self.sim.run(seconds)

    @invariant()
    def every_wait_has_a_wake_up_or_a_named_event(self) -> None:
        host = self.sim.host
        if host.leader is None or self.sim.is_down(host.leader) or not host.reason:
            return
        has_end = host.wake_at is not None or RESTING.match(host.reason)
        self.require("L2", has_end, "it waits without a wake-up")


class BoundedWait(RunMachine):
    """One disturbance of a quiet run at a time, each held to its own bound."""

    SLACK = 0.2

    @initialize(
        least=st.integers(1, 2),
        seed=st.integers(0, 1_000),
        nodes=st.integers(2, 4),
        elastic=st.booleans(),
        is_expected=st.booleans(),
    )
    def start(self, least: int, seed: int, nodes: int, elastic: bool, is_expected: bool) -> None:
        policy = replace(POLICY, min_nodes=least, max_nodes=6, max_restarts=1_000, no_progress_limit=1_000)
        self.begin(policy, seed, nodes, elastic)
        timing = self.sim.timing
        formed = timing.election + 1.5 * timing.set_up + self.SLACK
        if is_expected:
            self.sim.set_target(nodes)
            self.sim.run(formed)
            self.require("L1", len(self.sim.members) == nodes, "all are there and none is waited for")
            self.sim.set_target(6)
        else:
            self.sim.run(formed + policy.last_call)
            self.require("L1", len(self.sim.members) == nodes, "the last call is over")

    def can_spare(self) -> bool:
        return self.is_quiet() and len(self.ready()) > self.sim.policy.min_nodes

    def is_quiet(self) -> bool:
        sim = self.sim
        leads = sim.host.leader is not None and not sim.is_down(sim.host.leader)
        return bool(
            leads and sim.is_training and sorted(sim.members) == sorted(self.ready()) == sorted(self.living())
        )

    def calm_down(self) -> None:
        self.sim.run(10.0)

    def within(self, bound: float, name: str, problem: str) -> None:
        """Demand a new generation within a bound."""
        number = self.sim.number
        self.sim.run(bound)
        self.require(name, self.sim.number > number, f"{problem} is unanswered after {bound:.2f} s")

    def loss_bound(self, *, is_leader: bool) -> float:
        timing, policy = self.sim.timing, self.sim.policy
        detection = timing.ttl + timing.ttl_jitter + timing.election if is_leader else 0.0
        return detection + policy.probe_timeout + self.SLACK

    @precondition(lambda self: self.is_quiet() and len(self.ready()) < 6)
    @rule()
    def join(self) -> None:
        node = self.sim.add_node()
        self.within(1.5 * self.sim.timing.set_up + self.SLACK, "L1", "a ready node")
        self.require("L1", node in self.sim.members, "it joined")
        self.calm_down()

    @precondition(lambda self: self.can_spare())
    @rule(number=PICK)
    def kill(self, number: int) -> None:
        node = self.pick(number)
        assert node is not None
        is_leader = node == self.sim.host.leader
        self.sim.kill(node)
        restarts = self.sim.history[-1].generation.restart_count
        self.within(self.loss_bound(is_leader=is_leader), "L3", "a loss")
        entry = self.sim.history[-1]
        self.require("S9", entry.generation.restart_count == restarts, "a loss spent a restart")
        self.require("L3", node not in self.sim.members, "the lost node is out")
        self.calm_down()

    @precondition(lambda self: self.can_spare() and len(self.ready()) > 1)
    @rule(numbers=st.lists(PICK, min_size=2, max_size=4))
    def kill_many(self, numbers: list[int]) -> None:
        """R22: many losses at once are one generation."""
        chosen = {node for node in map(self.pick, numbers) if node is not None} - {self.sim.host.leader}
        spare = len(self.ready()) - self.sim.policy.min_nodes
        before = self.sim.number
        for node in sorted(chosen)[:spare]:
            self.sim.kill(node)
        if chosen:
            self.within(self.loss_bound(is_leader=False), "L3", "a mass loss")
            self.sim.run(5.0)
            self.require("L3", self.sim.number == before + 1, "one generation for one mass loss")
        self.calm_down()

    @precondition(lambda self: self.can_spare())
    @rule(number=PICK)
    def freeze(self, number: int) -> None:
        """A ring neighbour ends its lease, the coordinator's own as well."""
        node = self.pick(number)
        assert node is not None
        self.sim.freeze(node)
        suspicion = self.sim.timing.suspect + self.sim.timing.election
        self.within(suspicion + self.loss_bound(is_leader=False), "L3", "a frozen node")
        self.sim.thaw(node)
        self.calm_down()

    @precondition(lambda self: self.can_spare())
    @rule(number=PICK)
    def drain(self, number: int) -> None:
        node = self.pick(number)
        assert node is not None
        self.sim.drain(node)
        self.within(self.SLACK, "L5", "a drain")
        entry = self.sim.history[-1]
        self.require("L5", dict(entry.lost) == {node: "drained"}, f"drained {node}: {entry.lost}")
        self.calm_down()

    @precondition(lambda self: self.is_quiet() and len(self.ready()) > self.sim.policy.min_nodes)
    @rule(number=PICK)
    def fail_worker(self, number: int) -> None:
        node = self.pick(number)
        assert node is not None
        restarts = self.sim.history[-1].generation.restart_count
        self.sim.fail_worker(node)
        self.within(self.SLACK, "L1", "a failure with a known cause")
        self.require(
            "S9", self.sim.history[-1].generation.restart_count == restarts + 1, "a failure spends a restart"
        )
        self.calm_down()

    @precondition(lambda self: self.is_quiet())
    @rule()
    def forget_coordinator(self) -> None:
        number = self.sim.number
        self.sim.host.forget()
        self.calm_down()
        self.require("L4", self.sim.number == number, "a successor published for its own sake")

    @precondition(lambda self: self.is_quiet())
    @rule()
    def do_nothing(self) -> None:
        number = self.sim.number
        self.sim.run(30.0)
        self.require("S8", self.sim.number == number, "a generation without a cause")

    @precondition(lambda self: not self.is_quiet())
    @rule()
    def recover(self) -> None:
        if len(self.living()) < max(self.sim.policy.min_nodes, 2):
            self.sim.add_node()
        self.calm_down()
