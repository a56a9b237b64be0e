"""How the rendezvous grows with the number of nodes: one generation, and one more after a loss.

    python -m benchmarks.rendezvous [--nodes 16,64,256,1024] [--runs 3] [--peers elastic-train,torchrun]
        [--rescales 200] [--plot PATH] [--json PATH|-]

elastic-train: a real etcd and a real coordinator; nodes are records in the store, kept by some
threads. Each node does what an agent does: it writes its record when it is ready, reads its
assignment when `current` changes, and writes that it has entered. Timed is from the last node's
record until the last node has entered (`generation`), and from a node's end, which all others
report as a broken collective, until they have entered the next one (`after a loss`). Every write
of nodes and coordinator is counted. At 10,000 nodes the threads of this one process, not the
store, are what takes the time: `until published` is the coordinator's part of it.

torchrun: its dynamic rendezvous (c10d store), a thread a node, one generation; what is not
finished within 100 s counts with that.

The last rows are the store after `--rescales` generations of 64 nodes: the size of its file.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from elastic_core.agent.coordination import CoordinatorDriver
from elastic_core.agent.probe import ProbeServer
from elastic_core.clock import SystemClock
from elastic_core.ids import NO_REVISION, NodeId, RunId
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Generation, Target
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.rendezvous.events import CoordinatorPolicy
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Created, KeyWritten, Put, WatchRestarted
from elastic_core.store.server import EtcdOptions, EtcdServer
from elastic_core.testing.etcd_console import EtcdConsole
from elastic_core.testing.scenario import make_record

OURS, TORCHRUN = "elastic-train", "torchrun"
THREADS = 16
CLIENTS = 4
DEADLINE_S = 300.0
TORCH_LIMIT_S = 100.0
TORCH_MOST = 128
"""Nodes beyond which torch's rendezvous is not tried: it does not finish 128 in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One generation: seconds until it was published and entered by all, and writes of all to get there."""

    published: float
    entered: float
    writes: int


class Crowd:
    """Nodes of a run, as records that some threads keep."""

    def __init__(self, endpoint: str, run: str, count: int) -> None:
        self.keys = RunKeys(RunId(run))
        self._count = count
        self._probes = ProbeServer()
        self._stores = [EtcdStore(endpoint, timeout_s=60.0) for _ in range(CLIENTS)]
        self._pool = ThreadPoolExecutor(THREADS)
        self._records = {f"n{number}": self._record(number) for number in range(count)}
        self._leader = self._lead()
        self._published: dict[int, float] = {}
        self._changed = threading.Condition()
        self._watch = self._stores[0].watch([self.keys.current])
        self._threads = [
            threading.Thread(target=self._follow, daemon=True),
            threading.Thread(target=self._leader.run, daemon=True),
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leader.stop()
        self._watch.close()
        for thread in self._threads:
            thread.join(10)
        self._pool.shutdown()
        self._probes.close()
        for store in self._stores:
            store.close()

    def start(self) -> Round:
        """All nodes become ready; the first generation follows."""
        self._stores[0].put(self.keys.target, encode(Target(nodes=self._count)))
        before = self._revision()
        *others, last = self._records
        self._for_all(others, self._write)
        return self._round(1, before, lambda: self._write(last))

    def lose_one(self, number: int) -> Round:
        """A node is gone, and the others report that their collectives broke; one comes in its place."""
        before = self._revision()
        *others, lost = self._records
        self._records = {
            name: replace(record, broken=number) for name, record in self._records.items() if name != lost
        }

        def lose() -> None:
            self._stores[0].delete(self.keys.node(NodeId(lost)))
            self._for_all(others, self._write)

        return self._round(number + 1, before, lose)

    def rescale(self, number: int) -> None:
        """A node comes and the generation changes, or one leaves."""
        name, record = next(reversed(self._records.items()))
        if number % 2:
            self._write(name, replace(record, phase=NodePhase.DRAINING))
            self._await(number + 1)
            self._stores[0].delete(self.keys.node(NodeId(name)))
        else:
            self._write(name)
            self._await(number + 1)
        members = [each for each in self._records if number % 2 == 0 or each != name]
        self._for_all(members, lambda each: self._enter(each, number + 1))

    def _round(self, number: int, before: int, begin: Callable[[], None]) -> Round:
        began = time.monotonic()
        begin()
        self._await(number)
        published = self._published[number] - began
        self._for_all(list(self._records), lambda name: self._enter(name, number))
        entered = time.monotonic() - began
        return Round(published=published, entered=entered, writes=self._revision() - before)

    def _await(self, number: int) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._published, DEADLINE_S):
                raise TimeoutError(f"generation {number} of {self._count} nodes was not published")

    def _enter(self, name: str, number: int) -> None:
        store = self._store_of(name)
        if store.read(self.keys.assignment(number, NodeId(name))) is not None:
            self._write(name, replace(self._records[name], generation=number))

    def _write(self, name: str, record: NodeRecord | None = None) -> None:
        record = record or self._records[name]
        self._store_of(name).put(self.keys.node(record.node_id), encode(record))

    def _store_of(self, name: str) -> EtcdStore:
        return self._stores[hash(name) % CLIENTS]

    def _for_all(self, names: Sequence[str], act: Callable[[str], None]) -> None:
        list(self._pool.map(act, names))

    def _revision(self) -> int:
        return self._stores[0].read_prefix(self.keys.leader).revision

    def _record(self, number: int) -> NodeRecord:
        record = make_record(f"n{number}", number % 1_000)
        return replace(
            record,
            address="127.0.0.1",
            probe_port=self._probes.port,
            probe_token=self._probes.token,
        )

    def _lead(self) -> CoordinatorDriver:
        policy = CoordinatorPolicy(
            min_nodes=1,
            max_nodes=self._count,
            last_call=600.0,
            join_timeout=600.0,
            probe_timeout=5.0,
            max_restarts=1_000,
        )
        key = self.keys.leader
        won = self._stores[0].transact([Created(key, NO_REVISION)], [Put(key, b"n0")])
        return CoordinatorDriver(
            self._stores[1], self.keys, policy=policy, leader=won.revision, clock=SystemClock()
        )

    def _follow(self) -> None:
        for event in self._watch:
            entries = event.snapshot.entries if isinstance(event, WatchRestarted) else ()
            entries = (event.entry,) if isinstance(event, KeyWritten) else entries
            for entry in entries:
                with self._changed:
                    self._published.setdefault(decode(Generation, entry.value).number, time.monotonic())
                    self._changed.notify_all()


def main() -> None:
    """Measure and report."""
    arguments = _parse()
    log_to_stderr()
    facts = machine_facts()
    rows = [row for count in arguments.nodes for row in _measure(count, arguments.runs, arguments.peers)]
    if arguments.rescales:
        rows.append(measure_size(arguments.rescales))
    print_report(rows, arguments.json, facts=facts)
    if arguments.plot:
        draw(rows, Path(arguments.plot))


def _measure(count: int, runs: int, peers: Sequence[str]) -> Iterator[Row]:
    if OURS in peers:
        yield from measure(count, runs)
    if TORCHRUN in peers and count <= TORCH_MOST:
        taken = [measure_torch(count) for _ in range(runs)]
        done = sum(seconds < TORCH_LIMIT_S for seconds in taken)
        note = f"{done} of {runs} within {TORCH_LIMIT_S:.0f} s"
        yield Row.of(taken, peer=TORCHRUN, case=f"{count} nodes: generation", unit="s", note=note)


def measure(count: int, runs: int) -> Iterator[Row]:
    """Measure a generation and the one after a loss."""
    firsts, seconds = [], []
    with _store() as server:
        for number in range(runs):
            with Crowd(server.endpoint, f"crowd-{count}-{number}", count) as crowd:
                firsts.append(crowd.start())
                seconds.append(crowd.lose_one(1))
    for name, rounds in (("generation", firsts), ("after a loss", seconds)):
        case = f"{count} nodes: {name}"
        yield Row.of([each.entered for each in rounds], peer=OURS, case=case, unit="s")
        published = [each.published for each in rounds]
        yield Row.of(published, peer=OURS, case=f"{case}, until published", unit="s")
        writes = [each.writes / count for each in rounds]
        yield Row.of(writes, peer=OURS, case=f"{case}, writes a node", unit="writes")


def measure_size(rescales: int) -> Row:
    """Measure how large the store's file is after many changes of a run."""
    with _store(compaction="1s") as server:
        console = EtcdConsole(server.endpoint)
        sizes = []
        with Crowd(server.endpoint, "crowd-size", 64) as crowd:
            crowd.start()
            for number in range(1, rescales + 1):
                crowd.rescale(number)
                sizes.append(console.status().database_bytes / 2**20)
    return Row.of(sizes, peer=OURS, case=f"64 nodes: store over {rescales} rescales", unit="MiB")


def measure_torch(count: int) -> float:
    """Measure torch's rendezvous in a process of its own; what takes too long is ended."""
    command = [sys.executable, "-m", "benchmarks.scripts.torch_rendezvous", str(count)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TORCH_LIMIT_S + 30, check=True)
        return min(float(done.stdout), TORCH_LIMIT_S)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return TORCH_LIMIT_S


@contextlib.contextmanager
def _store(compaction: str = "5m") -> Iterator[EtcdServer]:
    with tempfile.TemporaryDirectory(prefix="rendezvous-") as directory:
        options = EtcdOptions(ends_with_parent=True, compaction=compaction)
        with EtcdServer(Path(directory) / "etcd", options) as server:
            yield server


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the medians of one generation over the number of nodes, both axes logarithmic."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for peer in dict.fromkeys(row.peer for row in rows):
        for what in ("generation", "after a loss"):
            points = [
                (int(row.case.split()[0]), row.median)
                for row in rows
                if row.peer == peer and row.case.endswith(f"nodes: {what}")
            ]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=f"{peer}: {what}")
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="seconds", title="One rendezvous")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    plt.close(figure)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="16,64,256,1024", help="with commas")
    parser.add_argument("--runs", type=int, default=3, help="of each number of nodes")
    parser.add_argument("--peers", default=f"{OURS},{TORCHRUN}", help="with commas")
    parser.add_argument("--rescales", type=int, default=200, help="for the store's size; 0: leave it out")
    parser.add_argument("--plot", default="", metavar="PATH", help="also draw the growth")
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    arguments = parser.parse_args()
    try:
        arguments.nodes = [int(each) for each in arguments.nodes.split(",")]
    except ValueError:
        parser.error(f"--nodes {arguments.nodes!r}: write numbers with commas between them")
    if any(not 2 <= each <= 100_000 for each in arguments.nodes):
        parser.error(f"--nodes {arguments.nodes}: each must be from 2 to 100000")
    arguments.peers = arguments.peers.split(",")
    if unknown := [each for each in arguments.peers if each not in (OURS, TORCHRUN)]:
        parser.error(f"--peers: {', '.join(unknown)} unknown; there are {OURS}, {TORCHRUN}")
    return arguments


if __name__ == "__main__":
    main()
