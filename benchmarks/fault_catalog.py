"""Faults, each a function that strikes a stage and says how many nodes are to train afterwards.

The stage has three nodes that train. A fault that takes something away for a while
gives it back with `Strike.undo`, which is a fault of its own: its way back is measured, too.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.stage import HANG_S, TTL_S, Stage

NODES = 3
"""Nodes that train before each fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """What a fault did.

    Attributes:
        at: When, in seconds since the epoch.
        world: Nodes that are to train now.
        after: Only a generation after this one shows that the fault is over; 0: it may change none.
        over_at: When the fault itself is over and what follows from it has begun; 0: at once.
        stays: Who is to train now, where the fault says it; empty: anybody.
        undo: Give back what was taken, once they do; returns how many nodes are to train then.
        patience_s: Time beyond the limit of every fault that this one itself takes.
    """

    at: float
    world: int
    after: int = 0
    over_at: float = 0.0
    stays: tuple[str, ...] = ()
    undo: Callable[[], int] | None = None
    patience_s: float = 0.0


AFTERMATH_S = TTL_S + 1.0
"""What comes of a store's fault has come by then: leases that ended meanwhile are known to have."""


Fault = Callable[[Stage, random.Random], Strike]


# ---- nodes and workers -----------------------------------------------------------------------


def worker_kill(stage: Stage, rng: random.Random) -> Strike:
    """A worker is killed."""
    pid = rng.choice(stage.agent(rng.choice(stage.members())).workers())
    number, at = stage.generation(), time.time()
    os.kill(pid, signal.SIGKILL)
    return Strike(at=at, world=NODES, after=number)


def agent_kill(stage: Stage, rng: random.Random) -> Strike:
    """An agent is killed, and its node dies with it."""
    number, at = stage.generation(), time.time()
    stage.agent(rng.choice(stage.members())).kill()
    return Strike(at=at, after=number, world=NODES - 1)


def node_kill(stage: Stage, rng: random.Random) -> Strike:
    """A node is gone at once, as in a power cut."""
    number, at = stage.generation(), time.time()
    stage.agent(rng.choice(stage.members())).kill_all()
    return Strike(at=at, after=number, world=NODES - 1)


def two_nodes_kill(stage: Stage, rng: random.Random) -> Strike:
    """Two of three nodes are gone at once."""
    victims = [stage.agent(name) for name in rng.sample(stage.members(), 2)]
    number, at = stage.generation(), time.time()
    for victim in victims:
        victim.kill_all()
    return Strike(at=at, after=number, world=NODES - 2)


def coordinator_kill(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """The node that coordinates is gone."""
    number, at = stage.generation(), time.time()
    stage.agent(stage.leader()).kill_all()
    return Strike(at=at, after=number, world=NODES - 1)


def coordinator_kill_at_write(stage: Stage, rng: random.Random) -> Strike:
    """The node that coordinates is gone in the moment in which its next generation is published."""
    number, leader = stage.generation(), stage.agent(stage.leader())
    drained = rng.choice([name for name in stage.members() if name != leader.name])
    stage.agent(drained).signal(signal.SIGTERM)
    stage.wait_entry(number + 1, HANG_S)
    at = time.time()
    leader.kill_all()
    return Strike(at=at, after=number + 1, world=NODES - 2)


def node_freeze(stage: Stage, rng: random.Random) -> Strike:
    """A node stands still until its lease is over, and goes on then."""
    name = rng.choice(stage.members())
    number, at = stage.generation(), time.time()
    stage.agent(name).freeze()

    def thaw() -> int:
        stage.wait(lambda: not _is_registered(stage, name), f"{name} is fenced", HANG_S)
        stage.agent(name).thaw()
        return NODES

    return Strike(at=at, after=number, world=NODES - 1, undo=thaw)


# ---- changes on purpose ----------------------------------------------------------------------


def sigterm(stage: Stage, rng: random.Random) -> Strike:
    """A node is asked to leave by SIGTERM."""
    number, at = stage.generation(), time.time()
    stage.agent(rng.choice(stage.members())).signal(signal.SIGTERM)
    return Strike(at=at, after=number, world=NODES - 1)


def notice(stage: Stage, rng: random.Random) -> Strike:
    """A node is drained through the store, as after a spot notice."""
    members = stage.run.facts().history[stage.generation()].members
    number, at = stage.generation(), time.time()
    stage.store.put(stage.run.keys.drain(rng.choice(members).node_id), b"")
    return Strike(at=at, after=number, world=NODES - 1)


def join(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """A node joins."""
    number, at = stage.generation(), time.time()
    stage.add_node()
    return Strike(at=at, after=number, world=NODES + 1, patience_s=HANG_S)


def join_during_rescale(stage: Stage, rng: random.Random) -> Strike:
    """Two nodes join within half a second while a third one leaves."""
    number, at = stage.generation(), time.time()
    stage.add_node()
    time.sleep(rng.random() / 2)
    stage.add_node()
    stage.agent(rng.choice(stage.members())).signal(signal.SIGTERM)
    return Strike(at=at, after=number, world=NODES + 1, patience_s=HANG_S)


def leave_during_join(stage: Stage, rng: random.Random) -> Strike:
    """A node leaves in the moment in which another one is admitted."""
    number = stage.generation()
    leaving = rng.choice(stage.members())
    at = time.time()
    stage.add_node()
    stage.wait_entry(number + 1)
    stage.agent(leaving).signal(signal.SIGTERM)
    return Strike(at=at, world=NODES, after=number + 1, patience_s=HANG_S)


# ---- the network -----------------------------------------------------------------------------


def cut_from_store(stage: Stage, rng: random.Random) -> Strike:
    """A node does not reach etcd any more, its peers it does."""
    return _cut(stage, rng, peers=False, store=True)


def cut_from_peers(stage: Stage, rng: random.Random) -> Strike:
    """A node does not reach the other nodes any more, etcd it does."""
    return _cut(stage, rng, peers=True, store=False)


def cut_off(stage: Stage, rng: random.Random) -> Strike:
    """A node reaches nobody any more."""
    return _cut(stage, rng, peers=True, store=True)


def _cut(stage: Stage, rng: random.Random, *, peers: bool, store: bool) -> Strike:
    members = stage.members()
    name = rng.choice(members)
    others = [other for other in members if other != name]
    number, at = stage.generation(), time.time()
    stage.network.cut(name, others if peers else [], store=store)

    def heal() -> int:
        stage.network.heal()
        return NODES

    return Strike(at=at, after=number, world=NODES - 1, stays=tuple(others), undo=heal)


# ---- the store -------------------------------------------------------------------------------


def etcd_restart(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """All members of etcd are killed and started again."""
    at = time.time()
    stage.etcd.stop()
    stage.etcd.start()
    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES)


def etcd_member_kill(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """The member of etcd that leads is killed, and comes back."""
    leader = stage.etcd.members[stage.etcd.leader()]
    at = time.time()
    leader.kill()

    def start() -> int:
        stage.etcd.start()
        return NODES

    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES, undo=start)


def etcd_leader_change(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """Another member of etcd leads."""
    at = time.time()
    stage.etcd.move_leader()
    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES)


def etcd_compaction(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """The history of etcd is forgotten up to now."""
    name = stage.etcd.leader()
    console = stage.etcd.console(name)
    at = time.time()
    console.compact(console.status().revision)
    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES)


def etcd_freeze(stage: Stage, rng: random.Random) -> Strike:  # noqa: ARG001
    """All members of etcd stand still for 20 s."""
    at = time.time()
    with _stopped(stage):
        time.sleep(20.0)
    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES)


def etcd_slow_disk(stage: Stage, rng: random.Random) -> Strike:
    """For ten seconds each write to etcd may stall for up to a second, as on a slow disk."""
    at = time.time()
    while time.time() < at + 10.0:
        with _stopped(stage):
            time.sleep(rng.random())
        time.sleep(0.1)
    return Strike(at=at, over_at=time.time() + AFTERMATH_S, world=NODES)


@contextmanager
def _stopped(stage: Stage) -> Iterator[None]:
    for server in stage.etcd.members.values():
        os.kill(server.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for server in stage.etcd.members.values():
            os.kill(server.pid, signal.SIGCONT)


def _is_registered(stage: Stage, name: str) -> bool:
    return any(node.partition(".")[0] == name for node in stage.run.facts().nodes)


NEEDS_NETWORK = ("cut_from_store", "cut_from_peers", "cut_off")
"""Faults that need nodes with a network of their own."""

FAULTS: dict[str, Fault] = {
    fault.__name__: fault
    for fault in (
        worker_kill,
        agent_kill,
        node_kill,
        two_nodes_kill,
        coordinator_kill,
        coordinator_kill_at_write,
        node_freeze,
        sigterm,
        notice,
        join,
        join_during_rescale,
        leave_during_join,
        cut_from_store,
        cut_from_peers,
        cut_off,
        etcd_restart,
        etcd_member_kill,
        etcd_leader_change,
        etcd_compaction,
        etcd_freeze,
        etcd_slow_disk,
    )
}
