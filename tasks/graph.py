"""A trained model as one file, written in a process of its own: it imports torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from tasks.report import read
from tasks.runs import RunDirectory


def model_of(directory: RunDirectory) -> Path:
    """Return the directory of a run's trained model.

    Raises:
        RefusedInput: It has none (yet).
    """
    report = read(directory.path)
    if report is None or not report.model:
        raise RefusedInput([f"run {directory.run} has no model: it did not finish, or its script wrote none"])
    return Path(report.model)


def write_graph(model: Path, form: str, output: Path | None = None) -> Path:
    """Write a trained model as one file and return its path.

    Raises:
        RefusedInput: The model cannot be written so.
    """
    command = [sys.executable, "-m", "elastic_core.trainer", "graph", str(model), form]
    if output is not None:
        command.append(f"--output={output}")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == ExitCode.REFUSED:
        raise RefusedInput(done.stderr.splitlines()[-1:])
    if done.returncode != 0:
        raise ElasticError(f"writing {model} as {form} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return Path(done.stdout.splitlines()[-1])
