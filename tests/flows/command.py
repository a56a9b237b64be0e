"""`elastic-train train` as a process of its own, and looks at what its runs have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic_core.model.job import JobSpec, NodeBounds, ScriptTraining
from tasks.process import ProcessIdentity, carrying
from tasks.providers.local import NODE_MARK
from tasks.runs import RunDirectory

SCRIPT = Path(__file__).with_name("waiting_script.py")
JOB = JobSpec(
    name="waiting",
    nodes=NodeBounds(min=1, max=2, target=2),
    training=ScriptTraining(script=str(SCRIPT)),
)


class Command:
    """`elastic-train train` as a process, its output read line by line."""

    def __init__(self, runs: Path, *options: str, environment: Mapping[str, str] | None = None) -> None:
        from prefect.settings import PREFECT_API_URL

        runs.parent.mkdir(parents=True, exist_ok=True)
        job = runs.parent / "job.yaml"
        job.write_text(JOB.model_dump_json())
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "train", str(job), "--runs", str(runs), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "PREFECT_API_URL": str(PREFECT_API_URL.value()),
                "PYTHONUNBUFFERED": "1",
                **(environment or {}),
            },
            start_new_session=True,
        )
        self.lines: list[str] = []

    def until(self, text: str) -> str:
        """Read on until a line holds a text, and return it."""
        assert self.process.stdout is not None
        try:
            for line in self.process.stdout:
                self.lines.append(line.rstrip())
                if text in line:
                    return line
        except BaseException as error:  # a test's timeout says what was printed until then
            error.add_note(f"{text!r} was not printed yet:\n" + "\n".join(self.lines))
            raise
        raise AssertionError(f"{text!r} was never printed:\n" + "\n".join(self.lines))

    def finish(self) -> int:
        """Read to the end and return the exit code."""
        rest, _ = self.process.communicate(timeout=120)
        self.lines += rest.splitlines()
        return self.process.returncode

    def kill(self) -> None:
        """Kill the flow, and nothing else."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def processes_of(run: RunDirectory) -> list[ProcessIdentity]:
    """Return all that runs of a run's nodes."""
    nodes = (run.path.absolute() / "nodes").glob("node-*.json")
    return [process for node in nodes for process in carrying(NODE_MARK, str(node))]


def agents_of(run: RunDirectory) -> list[Any]:
    """Return the pids of all agents that were ever started; a node may be on record before its agent is."""
    records = (run.path / "nodes").glob("node-*.json")
    started = (json.loads(record.read_text())["process"] for record in records)
    return sorted(process["pid"] for process in started if process is not None)
