"""A model's score on a job's held-out data, found in a process of its own: it imports torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.model.job import JobSpec
from elastic_core.quality.score import Score


class ScoringFailed(ElasticError):
    """The model could not be tried."""


def score(job: JobSpec, model: Path) -> Score:
    """Return how an exported model does on a job's held-out data.

    Raises:
        RefusedInput: The job holds no data out, or there is no model.
        ScoringFailed: Anything else; the message has the last lines that it wrote.
    """
    with tempfile.TemporaryDirectory(prefix="elastic-score-") as directory:
        file = Path(directory) / "job.yaml"
        file.write_text(job.model_dump_json())
        command = [sys.executable, "-m", "elastic_core.trainer", "score", str(file), str(model), "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    if done.returncode == ExitCode.REFUSED and lines and lines[-1].startswith('{"problems"'):
        raise RefusedInput(json.loads(lines[-1])["problems"])
    if done.returncode != 0:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise ScoringFailed(f"trying the model {model} ended with {done.returncode}:\n{tail}")
    return Score.model_validate_json(lines[-1])
