"""What runs there are, where one stands, and the request to stop it: commands that need no Prefect."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastic_core.cluster.provider import Instance
from elastic_core.errors import RefusedInput, StoreError
from elastic_core.ids import NodeId, instance_of
from elastic_core.model.codec import encode
from elastic_core.model.membership import Stop
from elastic_core.model.node import NodeRecord
from elastic_core.store.keys import RunKeys
from flows.live import figures
from tasks.agents import etcd_of, provider_of
from tasks.etcd import connected
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
    console.print(f"run {directory.run}: {_state(directory, root)}, attempt {directory.attempt()}")
    seen = _seen(directory)
    if seen.progress is not None:
        console.print("  ".join(f"{name} {value}" for name, value in figures(seen.progress)))
    console.print(_nodes_table(provider_of(directory.job().pool, root).list_nodes(directory.run), seen))
    if _state(directory, root) == "unfinished":
        console.print("no flow drives it: the same `train` command goes on with it")
    if directory.report_file.exists():
        console.print(f"report: {directory.report_file}")


def request_stop(run: str, root: Path) -> None:
    """Ask a run to save and end.

    Raises:
        NoSuchRun: There is no such run.
        RefusedInput: It does not run.
    """
    directory = find_run(root, run)
    etcd = etcd_of(directory.job(), directory)
    record = etcd.record()
    if record is None or not etcd.is_running():
        raise RefusedInput([f"run {directory.run} does not run: {_state(directory, root)}"])
    with connected(record.endpoint, directory.job().etcd) as store:
        store.put(RunKeys(directory.run).stop, encode(Stop(reason="`elastic-train stop`")))
    Console(highlight=False).print(f"run {directory.run} saves its state and ends")


def _seen(directory: RunDirectory) -> Observation:
    """Return what the run's store says, nothing if it does not answer."""
    etcd = etcd_of(directory.job(), directory)
    record = etcd.record()
    if record is None or not etcd.is_running():
        return Observation()
    try:
        with connected(record.endpoint, directory.job().etcd) as store:
            return observe(store, RunKeys(directory.run))
    except StoreError:
        return Observation()


def _state(directory: RunDirectory, root: Path) -> str:
    outcome = directory.outcome()
    if outcome is not None:
        return str(outcome)
    if is_driven(root, directory.job().name):
        return "running"
    return "unfinished"


def _nodes_table(instances: Sequence[Instance], seen: Observation) -> Table:
    members = {member.node_id for entry in seen.history[-1:] for member in entry.members}
    records = {instance_of(record.node_id): record for record in seen.nodes}
    table = Table("node", "state", "phase", "trains", "detail")
    for instance in instances:
        table.add_row(*_row(instance, records.get(instance.name), members))
    return table


def _row(instance: Instance, record: NodeRecord | None, members: set[NodeId]) -> tuple[str, ...]:
    code = "" if instance.exit_code is None else f"exit {instance.exit_code}"
    return (
        instance.name,
        instance.state,
        record.phase if record else "",
        "yes" if record and record.node_id in members else "",
        instance.detail or code,
    )
