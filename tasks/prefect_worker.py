"""What makes a server useful by itself: our deployments, and a worker that runs them.

A process worker, for one machine and one person: when it is stopped it kills the flows that it runs
(their nodes train on, and are adopted). Larger installations use a Docker pool.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import yaml

from elastic_core.errors import ElasticError
from elastic_core.model.codec import decode, encode
from tasks.prefect_server import HOME, ServerRecord, client_environment
from tasks.process import ProcessIdentity, end, identify, is_running, spawn

POOL: Final = "elastic"
PROJECT: Final = Path("prefect.yaml")
DEADLINE_S: Final = 300.0


class DeployFailed(ElasticError):
    """Prefect did not take our deployments."""


def deploy_all(record: ServerRecord, home: Path = HOME, *, project: Path = PROJECT) -> tuple[str, ...]:
    """Bring all deployments of the project's file to a server; return their names. May be repeated.

    Raises:
        DeployFailed: There is no such file here, or Prefect refused it.
    """
    if not project.is_file():
        raise DeployFailed(f"{project.absolute()} is not there: deploy from the checkout")
    made = _prefect(record, home, project, "work-pool", "create", POOL, "--type", "process")
    if made.returncode != 0 and "already exists" not in made.stdout + made.stderr:
        raise DeployFailed(_why("make the work pool", made))
    done = _prefect(record, home, project, "--no-prompt", "deploy", "--all", "--prefect-file", project.name)
    if done.returncode != 0:
        raise DeployFailed(_why("deploy", done))
    described = yaml.safe_load(project.read_text())
    return tuple(f"{each['name']}/{each['name']}" for each in described["deployments"])


def begin(record: ServerRecord, home: Path = HOME) -> ProcessIdentity:
    """Start the worker unless it runs already.

    Raises:
        DeployFailed: It ended at once.
    """
    running = status(home)
    if running is not None:
        return running
    pid = spawn(
        [sys.executable, "-m", "prefect", "worker", "start", "--pool", POOL, "--type", "process"],
        environment={**client_environment(record, home), "PREFECT_WORKER_QUERY_SECONDS": "5"},
        log=log_of(home),
    )
    process = identify(pid)
    if process is None:
        raise DeployFailed(f"the worker ended at once; see {log_of(home)}")
    draft = _record(home).with_suffix(".draft")
    draft.write_bytes(encode(process))
    draft.replace(_record(home))
    return process


def status(home: Path = HOME) -> ProcessIdentity | None:
    """Return the worker that runs from this home, or None."""
    try:
        process = decode(ProcessIdentity, _record(home).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return process if is_running(process) else None


def stop(home: Path = HOME) -> ProcessIdentity | None:
    """End the worker; return which one it was, or None if none ran."""
    process = status(home)
    if process is not None:
        end([process], grace_s=10)
    _record(home).unlink(missing_ok=True)
    return process


def log_of(home: Path) -> Path:
    """Return where the worker writes."""
    return home / "prefect-worker.log"


def _record(home: Path) -> Path:
    return home / "prefect-worker.json"


def _prefect(
    record: ServerRecord, home: Path, project: Path, *arguments: str
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "prefect", *arguments]
    try:
        return subprocess.run(
            command,
            env=client_environment(record, home),
            cwd=project.absolute().parent,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DeployFailed(f"Prefect did not answer `{' '.join(arguments)}` in {DEADLINE_S:.0f} s") from error


def _why(what: str, done: subprocess.CompletedProcess[str]) -> str:
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    return "\n".join([f"Prefect could not {what} (exit {done.returncode}):", *lines[-10:]])
