"""Run a training on an emulated AWS: `python -m tasks.emulator elastic-train train job.yaml`.

The command gets `--set pool…` and `--runs` for the emulator at its end. The
emulator lives as long as the command does.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, cast, get_args

import boto3
import typer

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from tasks.emulator.account import CREDENTIALS, BaseMaker, write_base
from tasks.emulator.cloud import Cloud
from tasks.emulator.hosts import HOST_BASE, Hosts, free_network
from tasks.emulator.stage import Incident, Stage
from tasks.providers.aws.base import Base
from tasks.providers.docker_engine import check_image, connect

CLUSTER: Final = "elastic"
REGION: Final = "us-west-2"
ZONES: Final = ("us-west-2a", "us-west-2b", "us-west-2c")
ROOT: Final = Path(".elastic/emulator")

ABOUT: Final = """emulated AWS at {url}: EC2 with spot market and fleets, EFS, SQS, EventBridge
  an instance is a container with an address of its VPC, its own metadata service, and its user data executed
  EFS is the directory {mount}; capacity, prices and a machine's speed are not AWS's, and nothing is billed"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulator:
    """An emulated cluster that is ready for jobs."""

    hosts: Hosts
    base: Base
    root: Path

    @property
    def mount(self) -> Path:
        """Where the cluster's file system is seen, on machines and here."""
        return self.hosts.place_of(self.base.file_system, self.base.access_point)

    def settings(self, image: str) -> dict[str, str]:
        """Return what a job's pool must say to be run here."""
        file = self.root / "base.json"
        write_base(self.base, file)
        self.mount.mkdir(parents=True, exist_ok=True)
        return {
            "kind": "aws",
            "cluster": self.base.cluster,
            "region": self.base.region,
            "base": str(file),
            "mount": str(self.mount),
            "image": image,
            "shm_gib": "1",
            "endpoint_url": self.hosts.cloud.url,
        }


@contextmanager
def emulator(root: Path, host_base: str) -> Iterator[Emulator]:
    """Start an emulated account with a cluster's base; everything ends with the context.

    Raises:
        RefusedInput: Another emulator uses the directory, or no engine answers.
    """
    root = root.absolute()
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedInput([f"--root: another emulator uses {str(root)!r}: give another one"]) from None
        for machine in root.glob("i-*"):
            shutil.rmtree(machine, ignore_errors=True)
        client = connect()
        with Cloud() as cloud, Hosts(cloud, root, base=host_base, client=client) as hosts:
            network = free_network(client)
            maker = BaseMaker(cloud=cloud, cluster=CLUSTER, region=REGION, zones=ZONES, network=network)
            yield Emulator(hosts=hosts, base=maker.make(), root=root)


def run(
    command: Annotated[list[str], typer.Argument(help="Program and arguments, the emulator's own left out.")],
    image: Annotated[str, typer.Option(help="Image of agent, workers and etcd.")] = "elastic-train:latest",
    host_base: Annotated[str, typer.Option(help="Base of the machines: Python 3 and apt.")] = HOST_BASE,
    stage: Annotated[str, typer.Option(help="Incidents while it trains: spot, crash, spot,crash…")] = "",
    root: Annotated[Path, typer.Option(help="Directory of machines and file systems; a short path.")] = ROOT,
) -> None:
    """Run a command on an emulated AWS, and tell whether it left anything behind."""
    incidents = _incidents(stage)
    check_image(connect(), image)
    with emulator(root, host_base) as made:
        settings = made.settings(image)
        typer.echo(ABOUT.format(url=made.hosts.cloud.url, mount=made.mount))
        given = [word for key, value in settings.items() for word in ("--set", f"pool.{key}={value}")]
        runs = made.mount / "runs"
        code = _run_staged(made, [*command, *given, "--runs", str(runs)], incidents, runs)
        made.hosts.wait()
        left = [instance.id for instance in made.hosts.cloud.instances() if instance.state != "terminated"]
    typer.echo(f"left behind: {', '.join(left)}" if left else "no instance is left, and the emulator ends")
    raise typer.Exit(code or (ExitCode.FAILED if left else ExitCode.OK))


def _incidents(stage: str) -> list[Incident]:
    names = [name.strip() for name in stage.split(",") if name.strip()]
    known = get_args(Incident)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise RefusedInput([f"--stage: {unknown[0]!r} is none of {', '.join(known)}"])
    return [cast("Incident", name) for name in names]


def _run_staged(made: Emulator, command: Sequence[str], incidents: Sequence[Incident], runs: Path) -> int:
    """Run a command with the incidents beside it; return its exit code."""
    over = threading.Event()
    events = boto3.client("events", region_name=REGION, endpoint_url=made.hosts.cloud.url, **CREDENTIALS)
    stage = Stage(hosts=made.hosts, runs=runs, events=events, say=typer.echo, over=over)
    thread = threading.Thread(target=stage.play, args=(incidents,), name="stage", daemon=True)
    environment = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
        "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
        "AWS_EC2_METADATA_DISABLED": "true",
    }
    # A terminal's Ctrl-C reaches the command as well: it saves and ends, and we with it.
    signal.signal(signal.SIGINT, lambda *_: None)
    with subprocess.Popen(command, env=environment) as process:
        signal.signal(signal.SIGTERM, lambda *_: process.terminate())
        thread.start()
        code = process.wait()
    over.set()
    thread.join()
    return code


def main() -> None:
    """Run; an error is one line a problem."""
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})(
        run
    )
    try:
        application()
    except RefusedInput as refusal:
        _fail(refusal.problems, ExitCode.REFUSED)
    except ElasticError as error:
        _fail(str(error).splitlines(), ExitCode.FAILED)


def _fail(lines: Sequence[str], code: ExitCode) -> None:
    for line in lines:
        typer.echo(line, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
