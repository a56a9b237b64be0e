"""Members whose leases etcd keeps although they are over, and how a person ends one.

etcd has been seen to hold leases for hours beyond their time (etcd-io/etcd#9935, #13975): the node is
dead, its key stands, and the run counts on it until the probes of its peers fence it.
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic_core.errors import RefusedInput
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.node import NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Store


def overdue(store: Store, records: Iterable[NodeRecord]) -> dict[NodeId, float]:
    """Return for how many seconds the leases of registered nodes are over, of those that are."""
    left = {record.node_id: store.remaining(record.lease) for record in records}
    return {node_id: -seconds for node_id, seconds in left.items() if seconds < 0}


def fence(store: Store, keys: RunKeys, records: Iterable[NodeRecord], name: str) -> tuple[NodeId, ...]:
    """End the membership of an instance's node at once; an agent that lives comes back as a new member.

    Args:
        store: The run's.
        keys: The run's.
        records: All registered nodes.
        name: The instance, as `elastic-train status` shows it.

    Raises:
        RefusedInput: No node of that name is registered.
    """
    records = list(records)
    mine = [record for record in records if name in (instance_of(record.node_id), record.node_id)]
    if not mine:
        there = ", ".join(sorted(instance_of(record.node_id) for record in records)) or "none"
        raise RefusedInput([f"node {name!r} is not registered; registered: {there}"])
    for record in mine:
        store.revoke(record.lease)
        store.delete(keys.node(record.node_id))  # its lease may be one that etcd does not end
    return tuple(record.node_id for record in mine)
