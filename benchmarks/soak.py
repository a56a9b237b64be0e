"""A busy machine without a fault: is any node evicted that is well?

    python -m benchmarks.soak [--minutes 60] [--load 8] [--json PATH|-]

Three nodes with gloo workers train on an etcd of three members while `--load` processes for each
core of the machine do nothing but count. Nothing is killed, frozen or cut, so that every
generation after the first whole one is a false eviction. The exit code is 1 if there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fault_catalog import NODES
from benchmarks.faults import PEER, set_stage
from benchmarks.network import Network
from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from benchmarks.stage import Stage, longest_pause

_LOOK_S = 1.0


def main() -> int:
    """Soak and report."""
    arguments = _parse()
    log_to_stderr()
    facts = machine_facts()
    with (
        tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as directory,
        Stage(Path(directory), Network()) as stage,
    ):
        set_stage(stage)
        first, began = stage.generation(), time.time()
        with burning(arguments.load * len(os.sched_getaffinity(0))):
            while time.time() < began + arguments.minutes * 60:
                time.sleep(_LOOK_S)
        evictions = stage.generation() - first
        steps = [step for step in stage.steps() if step.at >= began]
        pause = longest_pause(steps, struck_at=began, until=time.time())
        chronicle = stage.chronicle(stage.audit())
        stage.end()
    note = f"{arguments.minutes:g} minutes, {arguments.load} busy processes a core, {len(steps)} steps"
    rows = [
        Row.of([evictions], peer=PEER, case="false evictions", unit="generations", note=note),
        Row.of([pause], peer=PEER, case="longest time without a step", unit="s"),
    ]
    print_report(rows, arguments.json, facts=facts)
    if evictions:
        sys.stderr.write(f"{chronicle}\n")
    return 1 if evictions else 0


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """Keep the machine busy with so many processes."""
    command = [sys.executable, "-I", "-S", "-c", "while True: pass"]
    burners = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0, help="how long")
    parser.add_argument("--load", type=int, default=8, help=f"busy processes a core, beside {NODES} nodes")
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
