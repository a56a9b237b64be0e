"""Reconciliation against a provider that lists late, answers late, refuses and loses nodes."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_core.cluster.provider import Instance, InstanceState, LaunchResult
from elastic_core.planning.launches import LaunchLog
from elastic_core.planning.plan import ClusterPlan
from elastic_core.planning.reconciliation import GiveUp, Launch, Terminate, reconcile

ALIVE = {InstanceState.PENDING, InstanceState.RUNNING}


class LateProvider:
    """Knows the truth and lists it late."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.truth: dict[str, Instance] = {}
        self.visible_at: dict[str, float] = {}
        self.tokens: dict[str, tuple[str, ...]] = {}

    def launch(self, token: str, count: int, now: float) -> LaunchResult | None:
        if token not in self.tokens:
            names = tuple(f"i{len(self.truth) + k}" for k in range(self.rng.randint(0, count)))
            for name in names:
                self.truth[name] = Instance(name=name, state=InstanceState.PENDING)
                self.visible_at[name] = now + self.rng.choice([0.0, 1.0, 20.0, 100.0])
            self.tokens[token] = names
        if self.rng.random() < 0.2:
            return None
        names = self.tokens[token]
        return LaunchResult(launched=tuple(self.truth[name] for name in names), shortfall=count - len(names))

    def list_nodes(self, now: float) -> list[Instance]:
        return [node for name, node in self.truth.items() if self.visible_at[name] <= now]

    def end(self, name: str, state: InstanceState = InstanceState.ENDED) -> None:
        self.truth[name] = Instance(name=name, state=state, exit_code=1)

    def alive(self) -> list[str]:
        return [name for name, node in self.truth.items() if node.state in ALIVE]


class World:
    """One reconciled cluster over time, with the checks of each tick."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.provider = LateProvider(self.rng)
        self.plan = ClusterPlan(nodes=3, min_nodes=1, max_nodes=5, spares=1, replacements_per_hour=1000)
        self.log = LaunchLog(owner="1")
        self.now = 0.0
        self.given_up = False

    def members(self) -> set[str]:
        return {name for name in self.provider.alive() if int(name[1:]) % 2}

    def tick(self) -> None:
        observed = self.provider.list_nodes(self.now)
        self.log = self.log.noticed(observed)
        members = self.members()
        for action in reconcile(self.plan, observed, log=self.log, members=members, now=self.now):
            if isinstance(action, Launch):
                self.log = self.log.asked(action.record)
                result = self.provider.launch(action.token, action.count, self.now)
                if result is not None:
                    self.log = self.log.answered(action.token, result)
            elif isinstance(action, Terminate):
                assert not (members & set(action.names)) - self.plan.release
                for name in action.names:
                    self.provider.end(name)
            self.given_up |= isinstance(action, GiveUp)
        assert len(self.provider.alive()) <= self.plan.most, "S11"

    def disturb(self) -> None:
        alive = self.provider.alive()
        chance = self.rng.random()
        if chance < 0.3 and alive:
            for name in self.rng.sample(alive, self.rng.randint(1, len(alive))):
                self.provider.end(name)
        elif chance < 0.4:
            self.plan = self.plan.resized(self.rng.randint(0, 7))
        elif chance < 0.5 and alive:
            self.plan = self.plan.releasing(frozenset(self.rng.sample(alive, 1)))

    def advance(self) -> None:
        self.now += self.rng.choice([0.5, 1.0, 5.0, 30.0])


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 10**9))
def test_s11_the_cluster_never_exceeds_its_maximum_and_reaches_its_plan(seed: int) -> None:
    world = World(seed)
    for _ in range(60):
        world.disturb()
        world.tick()
        world.advance()
    world.plan = world.plan.releasing(frozenset())
    for _ in range(60):
        world.tick()
        world.now += 60.0
    alive = world.provider.alive()
    surplus_members = [name for name in alive if name in world.members()]
    assert len(alive) == max(world.plan.wanted, len(surplus_members))
    assert not world.given_up
