"""The view of a run is a fold of what the store says."""

from elastic_core.ids import LeaseId, NodeId, Revision, RunId
from elastic_core.model.codec import encode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Outcome, Target
from elastic_core.model.node import NodeRecord
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Entry, KeyDeleted, KeyWritten, Snapshot, WatchRestarted
from tasks.watch import RunFold

KEYS = RunKeys(RunId("digits-1"))


def entry(key: str, value: object, revision: int = 1) -> Entry:
    return Entry(key, encode(value), Revision(revision), Revision(revision), LeaseId(0))


def node(name: str) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(name),
        address="127.0.0.1",
        probe_port=1,
        probe_token="t",
        master_port=2,
        slots=1,
        lease=LeaseId(7),
    )


def failure(name: str, generation: int, *, consequence: bool) -> Failure:
    return Failure(
        node_id=NodeId(name),
        generation=generation,
        rank=0,
        local_rank=0,
        exit_code=1,
        message="ValueError: bad label 7",
        consequence=consequence,
    )


def fold(*entries: Entry) -> RunFold:
    made = RunFold(KEYS)
    made.apply(WatchRestarted(Snapshot(tuple(entries), Revision(9))))
    return made


def test_written_and_deleted_keys_change_the_view() -> None:
    run = fold(entry(KEYS.node(NodeId("node-1.a")), node("node-1.a")))
    run.apply(KeyWritten(entry(KEYS.node(NodeId("node-2.b")), node("node-2.b"))))
    run.apply(KeyDeleted(KEYS.node(NodeId("node-1.a")), Revision(3)))
    assert [record.node_id for record in run.observation().nodes] == ["node-2.b"]


def test_a_restarted_watch_replaces_everything_that_was_known() -> None:
    run = fold(entry(KEYS.target, Target(nodes=2)))
    run.apply(WatchRestarted(Snapshot((), Revision(20))))
    assert run.observation().target is None


def test_single_keys_are_decoded() -> None:
    closed = Closed(outcome=Outcome.SUCCEEDED, exit_code=0, reason="done")
    seen = fold(entry(KEYS.target, Target(nodes=3)), entry(KEYS.closed, closed)).observation()
    assert (seen.target, seen.closed) == (Target(nodes=3), closed)


def test_keys_of_a_newer_version_are_ignored() -> None:
    assert fold(Entry(f"{KEYS.prefix}news", b"?", Revision(1), Revision(1), LeaseId(0))).observation() == (
        RunFold(KEYS).observation()
    )


def test_the_root_cause_is_the_first_failure_to_arrive_that_nothing_else_explains() -> None:
    consequence = failure("node-1.a", 1, consequence=True)
    cause = failure("node-2.b", 1, consequence=False)
    later = failure("node-0.c", 1, consequence=False)
    seen = fold(
        entry(KEYS.failure(1, consequence.node_id), consequence, 4),
        entry(KEYS.failure(1, cause.node_id), cause, 5),
        entry(KEYS.failure(1, later.node_id), later, 6),
    ).observation()
    assert seen.failures == (consequence, cause, later)
    assert seen.root_cause() == cause
