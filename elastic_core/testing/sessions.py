"""The agents' part towards workers of the elastic API, played by a test: no etcd, no agents.

Workers are real processes with real collectives. The test starts them, publishes
generations as agents would pass them on, and kills, freezes or stops whom it likes.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import queue
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, Self, TypeVar

from elastic_core.channel import AGENT_SOCKET, WORKER_LAUNCH, LineBuffer, to_line
from elastic_core.ids import NodeId
from elastic_core.model.job import CheckpointPolicy
from elastic_core.model.membership import Assignment, Cause, Generation
from elastic_core.model.messages import (
    AgentMessage,
    EnterGeneration,
    LeaveGeneration,
    StopTraining,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
)
from elastic_core.testing.toy_worker import Act, TraineeJob, run

Message = TypeVar("Message", bound=WorkerMessage)

DEADLINE_S: Final = 60.0
"""Bounds every wait; nothing takes so long unless it hangs."""

_STUCK_S: Final = 0.1
_PORTS: Final = range(20_000, 30_000)

FORKS: Final = multiprocessing.get_context("forkserver")
"""Starts processes that have imported torch already; the first use of it takes some seconds."""

FORKS.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed", run.__module__])


class Gate:
    """Holds a worker before a step until the test lets it go on.

    Attributes:
        act: To be given to the node that is held.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.act = Act(step, "hold", str(path))
        self._path = path
        self._writer = -1

    def wait(self) -> None:
        """Wait until the worker has come to the gate."""
        deadline = time.monotonic() + DEADLINE_S
        while self._writer < 0:
            assert time.monotonic() < deadline, f"no worker comes to step {self.act.step}"
            try:
                self._writer = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError:  # nobody reads yet
                time.sleep(0.002)

    def open(self) -> None:
        """Let the worker go on."""
        os.close(self._writer)


class ToyNode:
    """One node with one worker.

    Attributes:
        heard: All that the worker has said, in order.
    """

    def __init__(
        self,
        name: str,
        *,
        run_dir: Path,
        job: TraineeJob,
        policy: CheckpointPolicy,
        acts: Sequence[Act],
        variables: Mapping[str, str],
    ) -> None:
        self.name = NodeId(name)
        self.heard: list[WorkerMessage] = []
        self.log = run_dir / f"{name}.log"
        self._messages: queue.Queue[WorkerMessage | None] = queue.Queue()
        self._directory = tempfile.TemporaryDirectory(prefix="et-")
        path = f"{self._directory.name}/agent.sock"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        environment = {
            AGENT_SOCKET: path,
            WORKER_LAUNCH: "1",
            "LOCAL_RANK": "0",
            "ELASTIC_NODE_ID": name,
            "ELASTIC_RUN_DIR": str(run_dir),
            "TOY_LOG": str(self.log),
            **variables,
        }
        self._process = FORKS.Process(target=run, args=(environment, job, policy, tuple(acts)), daemon=True)
        self._process.start()
        listener.settimeout(DEADLINE_S)
        self._connection, _ = listener.accept()
        listener.close()
        self._reader = threading.Thread(target=self._read, name=name, daemon=True)
        self._reader.start()

    # ---- words -------------------------------------------------------------------------------

    def send(self, message: AgentMessage) -> None:
        """Say something to the worker; one that has gone does not hear it."""
        with contextlib.suppress(OSError):
            self._connection.sendall(to_line(message))

    def stop(self, *, save: bool = True) -> None:
        """Ask it to end at the next boundary."""
        self.send(StopTraining(save=save, reason="the test says so"))

    def wait_for(self, kind: type[Message], which: Callable[[Message], bool] = lambda _: True) -> Message:
        """Return the next message of a kind.

        Raises:
            AssertionError: The worker ended, or said nothing like it in time; with its output.
        """
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                message = self._messages.get(timeout=max(0.01, deadline - time.monotonic()))
            except queue.Empty:
                message = None
            if message is None:
                raise AssertionError(f"{self.name} said no {kind.__name__}; its output:\n{self.output()}")
            if isinstance(message, kind) and which(message):
                return message

    def output(self) -> str:
        """Return all that the worker wrote."""
        return self.log.read_text() if self.log.exists() else ""

    def _read(self) -> None:
        buffer, is_first = LineBuffer(), True
        with contextlib.suppress(OSError):
            while data := self._connection.recv(1 << 16):
                for line in buffer.feed(data):
                    if not is_first:
                        message = decode_worker_message(line)
                        self.heard.append(message)
                        self._messages.put(message)
                    is_first = False
        self._messages.put(None)

    # ---- deeds -------------------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send the worker a signal."""
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait_until_frozen(self) -> None:
        """Wait until the worker has been stopped by a signal."""
        deadline = time.monotonic() + DEADLINE_S
        while Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            assert time.monotonic() < deadline, f"{self.name} does not freeze:\n{self.output()}"
            time.sleep(0.002)

    def wait_until_stuck(self) -> None:
        """Wait until the worker has used no processor time for a while: it waits in a collective."""
        deadline, used, since = time.monotonic() + DEADLINE_S, "", time.monotonic()
        while time.monotonic() - since < _STUCK_S:
            assert time.monotonic() < deadline, f"{self.name} does not stop working:\n{self.output()}"
            stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            now_used = f"{stat[0]} {stat[11]} {stat[12]}"
            if now_used != used or stat[0] != "S":
                used, since = now_used, time.monotonic()
            time.sleep(0.002)

    def exit_code(self) -> int:
        """Wait for the worker's end and return its code, minus the signal if one ended it."""
        self._process.join(DEADLINE_S)
        code = self._process.exitcode
        assert code is not None, f"{self.name} does not end; its output:\n{self.output()}"
        return code

    def close(self) -> None:
        """Kill the worker and forget it."""
        if self._process.is_alive():
            self.signal(signal.SIGKILL)
        self._process.join(DEADLINE_S)
        self._process.close()
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._reader.join(DEADLINE_S)
        self._connection.close()
        self._directory.cleanup()


class Sessions:
    """A run of toy nodes, and the generations that they are told of."""

    def __init__(
        self,
        run_dir: Path,
        job: TraineeJob,
        *,
        policy: CheckpointPolicy | None = None,
        attempt: int = 1,
        resume: Literal["auto", "require", "never"] = "auto",
    ) -> None:
        self.run_dir = run_dir
        self.job = job
        self.checkpoints = run_dir / "checkpoints"
        self._policy = (policy or CheckpointPolicy()).model_copy(update={"directory": str(self.checkpoints)})
        self._variables = {"ELASTIC_ATTEMPT": str(attempt), "TOY_RESUME": resume}
        self._number = 0
        self._gates = 0
        self._members: tuple[ToyNode, ...] = ()
        self._nodes: list[ToyNode] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for node in self._nodes:
            node.close()

    def start(self, name: str, *acts: Act) -> ToyNode:
        """Start a node and wait until its worker is set up."""
        node = ToyNode(
            name,
            run_dir=self.run_dir,
            job=self.job,
            policy=self._policy,
            acts=acts,
            variables=self._variables,
        )
        self._nodes.append(node)
        node.wait_for(WorkerReady)
        return node

    def gate(self, step: int) -> Gate:
        """Return a gate before a step, for one node to be held at."""
        self._gates += 1
        path = self.run_dir / f"gate-{self._variables['ELASTIC_ATTEMPT']}-{self._gates}"
        os.mkfifo(path)
        return Gate(path, step)

    def publish(self, *members: ToyNode, cause: Cause = Cause.START) -> int:
        """Publish the next generation: its members enter it, others of the one before leave."""
        self._number += 1
        generation = Generation(
            number=self._number,
            cause=cause,
            restart_count=0,
            world_size=len(members),
            group_world_size=len(members),
            master_address="127.0.0.1",
            master_port=free_port(),
        )
        for rank, node in enumerate(members):
            assignment = Assignment(
                number=self._number, node_id=node.name, group_rank=rank, first_rank=rank, slots=1
            )
            node.send(EnterGeneration(generation=generation, assignment=assignment))
        for node in self._members:
            if node not in members:
                node.send(LeaveGeneration(generation=self._number, cause=cause))
        self._members = members
        return self._number


def free_port() -> int:
    """Return a port outside the ephemeral range that nobody uses."""
    for port in _PORTS[os.getpid() % 5_000 :]:
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no free port in 20000-29999")
