"""The real torchrun with our back end: three agents as processes, gloo, one real etcd."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

SCRIPT = """
import os, pathlib, sys, time
import torch, torch.distributed as dist

directory = pathlib.Path(sys.argv[1])
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

def note(word):
    line = f"{word} rank={rank} size={size} pid={os.getpid()} port={os.environ['MASTER_PORT']}\\n"
    with (directory / "notes").open("a") as file:
        file.write(line)

note("start")
going = torch.ones(1)
while going.item():
    going.fill_(0 if rank == 0 and (directory / "finish").exists() else 1)
    dist.broadcast(going, 0)
    time.sleep(0.02)
note("end")
dist.destroy_process_group()
"""

NOTE = re.compile(r"(?P<word>\w+) rank=(?P<rank>\d+) size=(?P<size>\d+) pid=(?P<pid>\d+) port=(?P<port>\d+)")


class Job:
    """torchrun agents of one run in one directory."""

    def __init__(self, directory: Path, endpoint: str) -> None:
        self.directory = directory
        self.agents: list[subprocess.Popen[bytes]] = []
        self._endpoint = endpoint
        (directory / "train.py").write_text(SCRIPT)

    def add_agent(self) -> subprocess.Popen[bytes]:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=etcd3"),
            *(f"--rdzv-endpoint={self._endpoint}", f"--rdzv-id={self.directory.name}"),
            *("--nnodes=2:3", "--max-restarts=3", "--rdzv-conf=ttl=2,last_call_timeout=1,join_timeout=60"),
            *(str(self.directory / "train.py"), str(self.directory)),
        ]
        number = len(self.agents)
        with (self.directory / f"agent-{number}.log").open("wb") as log:
            agent = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.agents.append(agent)
        return agent

    def notes(self, word: str, size: int) -> list[dict[str, str]]:
        """Return what workers of a world of this size have noted."""
        with contextlib.suppress(FileNotFoundError):
            notes = [match.groupdict() for match in NOTE.finditer((self.directory / "notes").read_text())]
            return [note for note in notes if note["word"] == word and note["size"] == str(size)]
        return []

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + 90
        while not ready():
            assert time.monotonic() < deadline, f"{what}; the agents say:\n{self._logs()}"
            time.sleep(0.05)

    def finish(self) -> list[int]:
        """Let the training end and return the agents' exit codes."""
        (self.directory / "finish").touch()
        return [agent.wait(60) for agent in self.agents]

    def close(self) -> None:
        for agent in self.agents:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait(10)
        for note in self.notes("start", 2) + self.notes("start", 3):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(note["pid"]), signal.SIGKILL)

    def _logs(self) -> str:
        return "\n".join(path.read_text()[-2000:] for path in sorted(self.directory.glob("agent-*.log")))


@pytest.fixture
def job(tmp_path: Path, etcd_endpoint: str) -> Iterator[Job]:
    job = Job(tmp_path, etcd_endpoint)
    yield job
    job.close()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_torchrun_forms_recovers_from_a_worker_kill_and_a_lost_node_and_grows(job: Job) -> None:
    job.add_agent()
    job.add_agent()
    job.wait_until(lambda: len(job.notes("start", 2)) == 2, "no group of two")

    os.kill(int(job.notes("start", 2)[1]["pid"]), signal.SIGKILL)
    job.wait_until(lambda: len(job.notes("start", 2)) == 4, "no group after a worker's death")

    third = job.add_agent()
    job.wait_until(lambda: len(job.notes("start", 3)) == 3, "no group of three")

    third.send_signal(signal.SIGTERM)
    job.wait_until(lambda: len(job.notes("start", 2)) == 6, "no group after a node left")

    codes = job.finish()

    assert codes[:2] == [0, 0]
    assert codes[2] != 0
    assert sorted(note["rank"] for note in job.notes("start", 3)) == ["0", "1", "2"]
    ports = {note["port"] for size in (2, 3) for note in job.notes("start", size)}
    assert len(ports) == 4, "a round used another round's store"
    assert len(job.notes("end", 2)) == 2
