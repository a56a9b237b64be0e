"""How long a training stands still when a worker or a node is lost, or a node joins.

    python -m benchmarks.recovery [--peers torchrun,torchrun-noshare,torchrun-etcd3,torchft,torchft-tuned,
        elastic,elastic-api]
        [--faults worker_kill,node_kill,node_join] [--runs 5] [--timeout 90] [--json PATH|-]

Three nodes with one worker each (two, when one is to join) run the same paced training:
60 ms a step, a checkpoint each 20 steps. Ten steps after a checkpoint the fault comes.
Time is taken until every rank of the full group has finished a step in a process group
formed after the fault, and until the next step of any such group: survivors may go on
before the lost one is replaced. Peers take turns, so that whatever else the machine does
meets all of them. What did not recover in time counts with the limit, and the note says
how many did, and when the last worker of the full group had come how far.

    torchrun           torch's own agent, c10d store, all defaults
    torchrun-noshare   the same with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
    torchrun-etcd3     torchrun with our rendezvous
    torchft            torchft's own wrappers and lighthouse, all defaults (pip install torchft)
    torchft-tuned      the same with heartbeats of 1 s
    elastic            our agent, the same script
    elastic-api        our agent, a trainer on the elastic API
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.diary import MILESTONES, Recovery, find_recovery, read_notes, workers
from benchmarks.launchers import PEERS, Cluster, Peer, cluster, is_installed
from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from benchmarks.scripts.pace import EVERY_STEPS

START_S = 180.0
"""Longest wait for the first steps; a torchrun that may grow waits 30 s for more nodes."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Something that happens to a cluster.

    Attributes:
        before: Nodes at first.
        after: Nodes that train in the end.
        strike: Do it, given the ranks' processes; return when it was done.
    """

    before: int
    after: int
    strike: Callable[[Cluster, dict[int, int]], float]


def kill_worker(_: Cluster, pids: dict[int, int]) -> float:
    """Kill the worker of the highest rank."""
    struck_at = time.time()
    os.kill(pids[max(pids)], signal.SIGKILL)
    return struck_at


def kill_node(nodes: Cluster, pids: dict[int, int]) -> float:
    """Kill the node of the highest rank; not the first one, in which torchrun's store lives."""
    first = nodes.nodes[0]
    for rank in sorted(pids, reverse=True):
        victim = nodes.node_of(pids[rank])
        if victim is not first:
            break
    return victim.kill()


def add_node(nodes: Cluster, _: dict[int, int]) -> float:
    """Start one more node."""
    struck_at = time.time()
    nodes.start(1)
    return struck_at


FAULTS = {
    "worker_kill": Fault(before=3, after=3, strike=kill_worker),
    "node_kill": Fault(before=3, after=2, strike=kill_node),
    "node_join": Fault(before=2, after=3, strike=add_node),
}


def main() -> None:
    """Measure and report."""
    arguments = _parse()
    log_to_stderr()
    facts = machine_facts()
    found: dict[tuple[str, str], list[Recovery | None]] = {}
    for number in range(arguments.runs):
        for name in arguments.faults:
            for peer in arguments.peers:
                recovery = measure(PEERS[peer], FAULTS[name], arguments.timeout)
                found.setdefault((peer, name), []).append(recovery)
                said = f"{recovery.seconds:.2f} s" if recovery else f"not within {arguments.timeout:.0f} s"
                sys.stderr.write(f"run {number + 1}: {peer} {name}: {said}\n")
    rows = [
        row for (peer, name), each in found.items() for row in rows_of(peer, name, each, arguments.timeout)
    ]
    print_report(rows, arguments.json, facts=facts)


def measure(peer: Peer, fault: Fault, timeout_s: float) -> Recovery | None:
    """Bring a training up, strike, and return how it came back, None if it did not in time."""
    with tempfile.TemporaryDirectory(prefix="recovery-") as name:
        directory = Path(name)
        with cluster(peer, directory) as nodes:
            nodes.start(fault.before)
            pids = _wait_for_moment(directory, fault.before)
            struck_at = fault.strike(nodes, pids)
            deadline = time.monotonic() + timeout_s
            while time.monotonic() < deadline:
                recovery = find_recovery(read_notes(directory), struck_at=struck_at, world=fault.after)
                if recovery is not None:
                    return recovery
                time.sleep(POLL_S)
            return None


def _wait_for_moment(directory: Path, world: int) -> dict[int, int]:
    """Wait until a whole group has trained for a while and is halfway between two checkpoints."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        notes = read_notes(directory)
        pids = workers(notes, world)
        step = max((note.step for note in notes), default=-1)
        if pids and step > EVERY_STEPS and (step + 1) % EVERY_STEPS == EVERY_STEPS // 2:
            return pids
        time.sleep(POLL_S / 2)
    raise TimeoutError(f"no group of {world} within {START_S:.0f} s:\n{_last_words(directory)}")


def _last_words(directory: Path) -> str:
    return "\n".join(
        f"{path.name}: {line}"
        for path in directory.glob("*.log")
        for line in path.read_text().splitlines()[-5:]
    )


def rows_of(peer: str, fault: str, each: Sequence[Recovery | None], timeout_s: float) -> Iterator[Row]:
    """Yield the rows of one peer and one fault."""
    back = [recovery for recovery in each if recovery is not None]
    note = f"{len(back)} of {len(each)} recovered within {timeout_s:.0f} s"
    if back:
        note += "".join(f"; {what} {_median(back, what):.2f}" for what in _milestones(back))
    seconds = [recovery.seconds if recovery else timeout_s for recovery in each]
    yield Row.of(seconds, peer=peer, case=fault, unit="s", note=note)
    if back:
        next_steps = [recovery.next_step for recovery in back]
        yield Row.of(next_steps, peer=peer, case=f"{fault} next step", unit="s")
        pauses = [recovery.pause for recovery in back]
        yield Row.of(pauses, peer=peer, case=f"{fault} pause", unit="s")
        redone = [recovery.redone for recovery in back]
        yield Row.of(redone, peer=peer, case=f"{fault} redone", unit="steps")


def _milestones(back: Sequence[Recovery]) -> list[str]:
    return [what for what in MILESTONES if all(what in recovery.milestones for recovery in back)]


def _median(back: Sequence[Recovery], what: str) -> float:
    return statistics.median(recovery.milestones[what] for recovery in back)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    there = [name for name, peer in PEERS.items() if is_installed(peer)]
    parser.add_argument("--peers", default=",".join(there), help="with commas; default: what is installed")
    parser.add_argument("--faults", default="all", help="with commas")
    parser.add_argument("--runs", type=int, default=5, help="of each peer with each fault")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for a recovery")
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    arguments = parser.parse_args()
    for name, known in (("peers", PEERS), ("faults", FAULTS)):
        text = getattr(arguments, name)
        given = list(known) if text == "all" else text.split(",")
        if unknown := [each for each in given if each not in known]:
            parser.error(f"--{name}: {', '.join(unknown)} unknown; there are {', '.join(known)}")
        setattr(arguments, name, given)
    if absent := [name for name in arguments.peers if not is_installed(PEERS[name])]:
        parser.error(f"--peers: {', '.join(absent)}: not installed; pip install {PEERS[absent[0]].module}")
    return arguments


if __name__ == "__main__":
    main()
