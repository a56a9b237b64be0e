"""Prefect's data in a real Postgres, as the guide says: deployments, a run, and nothing in SQLite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks import prefect_server, prefect_worker
from tests.docker.engine import missing
from tests.tasks.test_prefect_worker import PROJECT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = Path(__file__).parents[1] / "scripts" / "nothing.py"


class Postgres:
    """A server of its own below a directory, reached by its socket and by loopback."""

    def __init__(self, programs: Path, directory: Path, port: int) -> None:
        self._programs, self._directory, self.port = programs, directory, port

    @property
    def url(self) -> str:
        return f"postgresql+asyncpg://postgres@127.0.0.1:{self.port}/prefect"

    def call(self, program: str, *arguments: str) -> str:
        """Run one of Postgres's programs as the user that it insists on."""
        done = subprocess.run(
            [str(self._programs / program), *arguments],
            user="postgres" if os.geteuid() == 0 else None,
            cwd=self._directory,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def count(self, what: str) -> int:
        where = ("-h", "127.0.0.1", "-p", str(self.port), "-U", "postgres")
        return int(self.call("psql", *where, "-Atc", f"select count(*) from {what}", "prefect"))


@pytest.fixture
def postgres() -> Iterator[Postgres]:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        missing("there is no Postgres: apt-get install postgresql")
    directory = Path(tempfile.mkdtemp(prefix="et-pg-"))
    if os.geteuid() == 0:
        shutil.chown(directory, "postgres")
    server = Postgres(found[-1].parent, directory, prefect_server._free_port())
    options = f"-p {server.port} -k {directory} -c listen_addresses=127.0.0.1 -c fsync=off"
    server.call("initdb", "-D", "data", "-A", "trust", "-U", "postgres")
    server.call("pg_ctl", "-D", "data", "-l", "log", "-w", "-o", options, "start")
    server.call("createdb", "-h", "127.0.0.1", "-p", str(server.port), "-U", "postgres", "prefect")
    yield server
    server.call("pg_ctl", "-D", "data", "-m", "immediate", "stop")
    shutil.rmtree(directory)


def test_deployments_and_a_run_are_in_postgres(
    postgres: Postgres, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(prefect_server.AUTH, raising=False)
    monkeypatch.setenv("PREFECT_SERVER_DATABASE_CONNECTION_URL", postgres.url)
    record = prefect_server.begin(tmp_path)
    try:
        prefect_server.wait_healthy(record, tmp_path)
        names = prefect_worker.deploy_all(record, tmp_path, project=PROJECT)
        assert postgres.count("deployment") == len(names) > 3
        job = tmp_path / "job.yaml"
        job.write_text(f"name: one\nnodes: {{target: 1}}\ntraining: {{kind: script, script: {SCRIPT}}}\n")
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "train", str(job), "--runs", str(tmp_path / "runs")],
            env={**os.environ, "PREFECT_API_URL": record.api},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert postgres.count("flow_run where state_type = 'COMPLETED'") == 1
        assert list(tmp_path.rglob("prefect.db")) == []
    finally:
        prefect_server.stop(tmp_path)
