"""Every fault on a real training: does it go on, exactly once, with one writer and nothing left behind?

    python -m benchmarks.faults [--seeds 5] [--first-seed 0] [--faults worker_kill,node_freeze,…]
        [--json PATH|-]

A seed is one play: three nodes with gloo workers train on an etcd of three members, and all
faults happen to them one after the other, in an order, at moments and to victims that the seed
decides. After each of them the training must be whole within 30 s: the right number of nodes in
one group has made a step. Then the stage is set again for the next one. At the end of a play the
samples' record, the order of writers, the exit codes and what was left behind are looked at.

For each fault there are two rows: the longest time without a step on the way (`pause`), and the
time until the group was whole (`whole`), of which a fault takes some itself: a freeze of 20 s is
over after 20 s. A fault with `undo` is followed by a row for its end. Nodes are in network
namespaces of their own where this process may make them (root), else cuts are left out.

The exit code is 1 if anything did not hold.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.fault_catalog import FAULTS, NEEDS_NETWORK, NODES, Strike
from benchmarks.network import network
from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from benchmarks.stage import HANG_S, START_S, Hung, Stage, longest_pause

PEER = "elastic-train"
STOPPED = 75
"""Exit code of a node whose run was stopped on purpose."""


@dataclass(slots=True)
class Outcomes:
    """What one fault did in all plays.

    Attributes:
        struck: How often it happened.
        pauses: Longest times without a step.
        wholes: Times until the group was whole.
        problems: What did not hold.
    """

    struck: int = 0
    pauses: list[float] = field(default_factory=list)
    wholes: list[float] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Findings:
    """What all plays showed.

    Attributes:
        faults: By the fault's name, "… undone" for its end.
        checks: What was counted at the end of each play, which should be 0, by what it is.
    """

    faults: dict[str, Outcomes] = field(default_factory=dict)
    checks: dict[str, list[int]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def of(self, name: str) -> Outcomes:
        """Return a fault's outcomes, to be added to."""
        return self.faults.setdefault(name, Outcomes())

    @property
    def holds(self) -> bool:
        """Whether nothing went wrong."""
        return not self.problems and not any(each.problems for each in self.faults.values())


def main() -> int:
    """Play and report."""
    arguments = _parse()
    log_to_stderr()
    facts = machine_facts()
    found = Findings()
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        play(seed, arguments.faults, found)
    console = Console(stderr=True, width=None)
    console.print(_verdicts(found))
    for problem in found.problems:
        console.print(f"[red]{escape(problem)}[/]")
    print_report(list(rows_of(found)), arguments.json, facts=facts)
    return 0 if found.holds else 1


def play(seed: int, names: list[str], found: Findings) -> None:
    """Let all faults happen to one training."""
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as directory:
        net = network()
        order = [name for name in names if net.can_cut or name not in NEEDS_NETWORK]
        rng.shuffle(order)
        with Stage(Path(directory), net) as stage:
            for name in order:
                try:
                    set_stage(stage)
                except Hung as error:
                    found.problems.append(f"seed {seed}: before {name}: {error}")
                    _say(f"{found.problems[-1]}\n{stage.story()}")
                    break
                try:
                    time.sleep(rng.random() / 5)  # the moment within a step is the seed's, too
                    _happen(stage, name, rng, found, seed)
                except Hung as error:
                    found.of(name).problems.append(f"seed {seed}: {error}")
                    _say(f"seed {seed}: {name}: {error}\n{stage.story()}")
                    break
            _judge(stage, seed, found)


def set_stage(stage: Stage) -> None:
    """Bring the number of nodes to what each fault begins with.

    Raises:
        Hung: They do not train together in time.
    """
    since = time.time()
    training = stage.members() if stage.generation() else []
    for _ in range(NODES - len(training)):
        stage.add_node()
    for name in training[NODES:]:
        stage.agent(name).signal(signal.SIGTERM)
    stage.wait_whole(NODES, since=since, timeout_s=START_S)


def _happen(stage: Stage, name: str, rng: random.Random, found: Findings, seed: int) -> None:
    outcomes = found.of(name)
    outcomes.struck += 1
    strike = FAULTS[name](stage, rng)
    _measure(stage, strike, outcomes)
    said = f"whole after {outcomes.wholes[-1]:.2f} s, pause {outcomes.pauses[-1]:.2f} s"
    _say(f"seed {seed}: {name}: {said}")
    if strike.undo is not None:
        undone = found.of(f"{name} undone")
        undone.struck += 1
        at = time.time()
        world = strike.undo()
        _measure(stage, Strike(at=at, world=world, patience_s=HANG_S), undone)


def _measure(stage: Stage, strike: Strike, outcomes: Outcomes) -> None:
    since = max(strike.at, strike.over_at)
    limit = HANG_S + strike.patience_s + max(0.0, since - time.time())
    step = stage.wait_whole(strike.world, since=since, after=strike.after, timeout_s=limit)
    steps = stage.steps()
    pause = longest_pause(steps, struck_at=strike.at, until=step.at)
    first = next(each for each in steps if each.generation == step.generation)
    outcomes.wholes.append(max(0.0, first.at - strike.at))
    outcomes.pauses.append(pause)
    if strike.stays and set(stage.members()) != set(strike.stays):
        outcomes.problems.append(f"{' '.join(stage.members())} train, not {' '.join(strike.stays)}")
    if pause > HANG_S:
        outcomes.problems.append(f"stood still for {pause:.1f} s")


def _judge(stage: Stage, seed: int, found: Findings) -> None:
    """Look at what a play left when it is over."""
    try:
        codes = stage.end()
    except Hung as error:
        found.problems.append(f"seed {seed}: {error}")
        return
    audit = stage.audit()
    counts = {
        "samples missed or repeated": audit.missed + audit.repeated + audit.foreign + audit.unrecorded,
        "steps of an older group after those of a newer": len(stage.writers_out_of_turn()),
        "left behind": len(stage.left_behind()),
        "exit codes that are not 75": sum(code != STOPPED for code in codes.values()),
    }
    for what, count in counts.items():
        found.checks.setdefault(what, []).append(count)
        if count:
            found.problems.append(f"seed {seed}: {count} {what}")
    if not audit.is_exact:
        found.problems.append(f"seed {seed}: {audit.sentence()}")
    found.problems += [f"seed {seed}: left behind: {each}" for each in stage.left_behind()]
    found.problems += [
        f"seed {seed}: {name} ended with {code}" for name, code in codes.items() if code != STOPPED
    ]
    found.checks.setdefault("steps done again", []).append(audit.steps_lost)
    _say(f"seed {seed}: {audit.steps} steps, {audit.sentence()}; generations:\n{stage.chronicle(audit)}")


def rows_of(found: Findings) -> Iterator[Row]:
    """Yield the rows of all faults, then the checks."""
    for name, each in found.faults.items():
        note = f"{each.struck - len(each.problems)} of {each.struck} held"
        if each.wholes:
            yield Row.of(each.pauses, peer=PEER, case=f"{name}: pause", unit="s", note=note)
            yield Row.of(each.wholes, peer=PEER, case=f"{name}: whole", unit="s", note=note)
        else:
            yield Row.of([HANG_S], peer=PEER, case=f"{name}: whole", unit="s", note=note)
    for what, counts in found.checks.items():
        yield Row.of(counts, peer=PEER, case=what, unit="a play", note="a play is all faults in turn")


def _verdicts(found: Findings) -> Table:
    table = Table("fault", "held", "pause", "whole", title="faults")
    for name, each in found.faults.items():
        held = each.struck - len(each.problems)
        style = "green" if held == each.struck else "red"
        table.add_row(
            name,
            f"[{style}]{held} of {each.struck}[/]",
            f"≤ {max(each.pauses):.2f} s" if each.pauses else "",
            f"≤ {max(each.wholes):.2f} s" if each.wholes else "",
        )
    return table


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5, help="plays")
    parser.add_argument("--first-seed", type=int, default=0, help="seed of the first play")
    parser.add_argument("--faults", default=",".join(FAULTS), help="with commas")
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    arguments = parser.parse_args()
    given = arguments.faults.split(",")
    if unknown := [name for name in given if name not in FAULTS]:
        parser.error(f"--faults: {', '.join(unknown)} unknown; there are {', '.join(FAULTS)}")
    arguments.faults = given
    return arguments


if __name__ == "__main__":
    sys.exit(main())
