"""What runs there are, where one stands, and the request to stop it: commands that need no Prefect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastic_core.cluster.provider import Instance
from elastic_core.errors import RefusedInput, StoreError
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.codec import encode
from elastic_core.model.membership import Stop
from elastic_core.model.node import NodeRecord
from elastic_core.model.progress import SlowWorker
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Store
from flows.live import figures
from tasks.agents import etcd_of, provider_of
from tasks.etcd import connected
from tasks.leases import fence, overdue
from tasks.runs import RunDirectory, all_runs, find_run, is_driven
from tasks.watch import Observation, observe


def show_runs(root: Path) -> None:
    """Print a table of all runs."""
    table = Table("run", "state", "attempts", "nodes wanted")
    for directory in all_runs(root):
        wanted = str(directory.job().nodes.target)
        table.add_row(directory.run, _state(directory, root), str(directory.attempt()), wanted)
    Console().print(table if table.row_count else "there are no runs yet")


def show_status(run: str, root: Path) -> None:
    """Print where a run stands.

    Raises:
        NoSuchRun: There is no such run.
    """
    directory = find_run(root, run)
    console = Console(highlight=False, soft_wrap=True)
    seen, over = _seen_with_leases(directory)
    console.print(_summary(directory, root, seen))
    for node_id, seconds in over.items():
        remedy = f"elastic-train fence {directory.run} {instance_of(node_id)}"
        console.print(f"{node_id}: its lease is over for {seconds:.0f} s and etcd keeps it: `{remedy}`")
    nodes = provider_of(directory.job().pool, root).list_nodes(directory.run)
    console.print(_nodes_table(_rows(nodes, seen)))
    if _state(directory, root) == "unfinished":
        console.print("no flow drives it: the same `train` command goes on with it")
    if directory.report_file.exists():
        console.print(f"report: {directory.report_file}")


def summary_of(run: str, runs: str) -> tuple[RunDirectory, str]:
    """Return a run and where it stands, in one sentence. Raises NoSuchRun."""
    root = Path(runs)
    directory = find_run(root, run)
    return directory, _summary(directory, root, _seen(directory)).replace("\n", "; ")


def rows_of(directory: RunDirectory) -> list[dict[str, str]]:
    """Return the table of a run's nodes."""
    pool, root = directory.job().pool, directory.path.parent
    return _rows(provider_of(pool, root).list_nodes(directory.run), _seen(directory))


def request_stop(run: str, root: Path) -> None:
    """Ask a run to save and end.

    Raises:
        NoSuchRun: There is no such run.
        RefusedInput: It does not run.
    """
    directory = find_run(root, run)
    with _store_of(directory, root) as store:
        store.put(RunKeys(directory.run).stop, encode(Stop(reason="`elastic-train stop`")))
    Console(highlight=False).print(f"run {directory.run} saves its state and ends")


def fence_node(run: str, node: str, root: Path) -> None:
    """End a node's membership at once.

    Raises:
        NoSuchRun: There is no such run.
        RefusedInput: It does not run, or has no such node.
    """
    directory = find_run(root, run)
    keys = RunKeys(directory.run)
    with _store_of(directory, root) as store:
        ended = fence(store, keys, observe(store, keys).nodes, node)
    Console(highlight=False).print(f"run {directory.run}: {', '.join(ended)} is no member any more")


@contextmanager
def _store_of(directory: RunDirectory, root: Path) -> Iterator[Store]:
    """Connect to a run's store. Raises RefusedInput: it does not run."""
    etcd = etcd_of(directory.job(), directory)
    record = etcd.record()
    if record is None or not etcd.is_running():
        raise RefusedInput([f"run {directory.run} does not run: {_state(directory, root)}"])
    with connected(record.endpoint, etcd.source) as store:
        yield store


def _seen(directory: RunDirectory) -> Observation:
    return _seen_with_leases(directory)[0]


def _seen_with_leases(directory: RunDirectory) -> tuple[Observation, dict[NodeId, float]]:
    """Return what the run's store says, nothing if it does not answer, and which leases are over."""
    try:
        with _store_of(directory, directory.path.parent) as store:
            seen = observe(store, RunKeys(directory.run))
            return seen, overdue(store, seen.nodes)
    except (RefusedInput, StoreError):
        return Observation(), {}


def _state(directory: RunDirectory, root: Path) -> str:
    outcome = directory.outcome()
    if outcome is not None:
        return str(outcome)
    if is_driven(root, directory.job().name):
        return "running"
    return "unfinished"


def _summary(directory: RunDirectory, root: Path, seen: Observation) -> str:
    said = f"run {directory.run}: {_state(directory, root)}, attempt {directory.attempt()}"
    if seen.progress is None:
        return said
    return "\n".join((said, "  ".join(f"{name} {value}" for name, value in figures(seen.progress))))


def _nodes_table(rows: Sequence[dict[str, str]]) -> Table:
    table = Table("node", "state", "phase", "trains", "detail")
    for row in rows:
        table.add_row(*row.values())
    return table


def _rows(instances: Sequence[Instance], seen: Observation) -> list[dict[str, str]]:
    members = {member.node_id for entry in seen.history[-1:] for member in entry.members}
    records = {instance_of(record.node_id): record for record in seen.nodes}
    slow = {instance_of(found.node_id): found for found in seen.slow if found.is_slow}
    return [
        _row(instance, records.get(instance.name), members, slow.get(instance.name)) for instance in instances
    ]


def _row(
    instance: Instance, record: NodeRecord | None, members: set[NodeId], slow: SlowWorker | None
) -> dict[str, str]:
    pace = f"slow: {slow.ratio:.1f} times the others' work a step" if slow and record else ""
    code = "" if instance.exit_code is None else f"exit {instance.exit_code}"
    return {
        "node": instance.name,
        "state": str(instance.state),
        "phase": str(record.phase) if record else "",
        "trains": "yes" if record and record.node_id in members else "",
        "detail": instance.detail or code or (record.notice if record else "") or pace,
    }
