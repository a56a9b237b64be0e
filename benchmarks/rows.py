"""What every benchmark reports: rows of numbers, with the machine they were measured on.

A row without its peer, its case and its count proves nothing, and neither does one
without the machine: `print_report` writes all of it, as a table and as JSON.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

PACKAGES = ("elastic-train", "torch", "grpcio", "protobuf", "prefect", "classy-vision")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The measurements of one case with one peer.

    Attributes:
        peer: Who was measured: "elastic-train", "torchrun", …
        case: What was measured: "put to watch event".
        n: Number of measurements.
        unit: "ms", "s", "calls/s", …
        note: What a reader must know to compare it.
    """

    peer: str
    case: str
    n: int
    min: float
    median: float
    max: float
    unit: str
    note: str = ""

    @classmethod
    def of(cls, values: Sequence[float], *, peer: str, case: str, unit: str, note: str = "") -> Row:
        """Summarise measurements, of which there must be one at least."""
        return cls(
            peer=peer,
            case=case,
            n=len(values),
            min=min(values),
            median=statistics.median(values),
            max=max(values),
            unit=unit,
            note=note,
        )


def machine_facts() -> dict[str, Any]:
    """Return what the numbers depend on: processor, memory, load, versions."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "packages": _versions(),
        "load_before": [round(load, 2) for load in os.getloadavg()],
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def log_to_stderr() -> None:
    """Keep what the library logs out of standard output, where JSON may go."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))


def print_report(rows: Sequence[Row], json_path: str = "", *, facts: dict[str, Any] | None = None) -> None:
    """Print the rows as a table and write them, with the machine's facts, as JSON.

    `json_path` is a file, "-" for standard output (the table then goes to standard error), or ""
    for none; `facts` are those of before the measurement, of now if they are not given.
    """
    facts = facts or machine_facts()
    console = _console(_table(rows), stderr=json_path == "-")
    console.print(_table(rows))
    load = ", ".join(str(value) for value in facts["load_before"])
    console.print(f"{facts['cpu']}, {facts['cores']} cores, load before {load}, Python {facts['python']}")
    text = json.dumps({"machine": facts, "rows": [asdict(row) for row in rows]}, indent=2)
    if json_path == "-":
        sys.stdout.write(text + "\n")
    elif json_path:
        Path(json_path).write_text(text + "\n")


def _console(table: Table, *, stderr: bool) -> Console:
    """Return where a table is printed: a file is as wide as the table, a terminal as wide as it is."""
    console = Console(stderr=stderr)
    if not console.is_terminal:
        unlimited = console.options.update(max_width=1_000)
        console.width = max(console.width, Measurement.get(console, unlimited, table).maximum)
    return console


def _table(rows: Sequence[Row]) -> Table:
    """Return the rows by peer; notes stand below their cases, so that numbers keep their columns."""
    table = Table("case", box=box.SIMPLE_HEAD)
    for name in ("n", "min", "median", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("unit", no_wrap=True)
    peer = None
    for row in rows:
        if row.peer != peer:
            peer = row.peer
            table.add_row(f"[bold]{escape(peer)}[/]")
        numbers = (f"{value:.4g}" for value in (row.min, row.median, row.max))
        note = f"\n  [dim]{escape(row.note)}[/]" if row.note else ""
        table.add_row(f"{escape(row.case)}{note}", str(row.n), *numbers, row.unit)
    return table


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _versions() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
