"""A lease that is over and stands is found and can be ended; nobody else is touched."""

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.ids import LeaseId, NodeId, RunId
from elastic_core.model.codec import encode
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.testing.memory_store import MemoryServer, MemoryStore
from tasks.leases import fence, overdue
from tasks.watch import observe

KEYS = RunKeys(RunId("digits-1"))


class Undying(MemoryStore):
    """A store that keeps a lease beyond its time, as etcd has been seen to."""

    stuck = LeaseId(0)

    def remaining(self, lease: LeaseId) -> float:
        return -68_272.0 if lease == self.stuck else super().remaining(lease)

    def revoke(self, lease: LeaseId) -> None:
        if lease != self.stuck:
            super().revoke(lease)


@pytest.fixture
def store() -> Undying:
    made = Undying(MemoryServer())
    for name in ("a.1", "b.1"):
        lease = made.grant(60)
        node = NodeRecord(
            node_id=NodeId(name),
            address="10.0.0.1",
            probe_port=1,
            probe_token="t",
            master_port=2,
            slots=1,
            lease=lease,
            phase=NodePhase.READY,
        )
        made.put(KEYS.node(node.node_id), encode(node), lease)
        made.stuck = lease
    return made


@pytest.mark.case("E12")
def test_a_member_whose_lease_is_over_is_found_and_can_be_removed(store: Undying) -> None:
    assert overdue(store, observe(store, KEYS).nodes) == {NodeId("b.1"): 68_272.0}
    assert fence(store, KEYS, observe(store, KEYS).nodes, "b") == (NodeId("b.1"),)
    assert [node.node_id for node in observe(store, KEYS).nodes] == ["a.1"]
    assert overdue(store, observe(store, KEYS).nodes) == {}


def test_a_living_member_is_fenced_with_its_lease(store: Undying) -> None:
    lease = observe(store, KEYS).nodes[0].lease
    fence(store, KEYS, observe(store, KEYS).nodes, "a.1")
    assert store.remaining(lease) < 0


def test_a_name_that_is_not_registered_is_refused_with_those_that_are(store: Undying) -> None:
    with pytest.raises(RefusedInput) as raised:
        fence(store, KEYS, observe(store, KEYS).nodes, "c")
    assert raised.value.problems == ("node 'c' is not registered; registered: a, b",)
