"""One job on an emulated account whose k-th create call goes wrong, then the same command again.

`python -m tests.flows.aws_matrix ROOT CASE…` prints a line of JSON a case: what the first run said and
left, and what the second one did. A case is CALL:HOW, and how is fails, lost or killed.
"""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tasks.emulator.__main__ import Emulator, emulator
from tasks.emulator.account import CREDENTIALS
from tasks.emulator.frontdoor import Fault

BASE = os.environ.get("ELASTIC_TEST_BASE", "elastic-base:bookworm")
IMAGE = os.environ.get("ELASTIC_TEST_IMAGE", "elastic-train:test")


def main() -> None:
    root, *cases = sys.argv[1:]
    with emulator(Path(root), BASE) as made:
        for case in cases:
            call, how = case.split(":")
            sys.stdout.write(json.dumps({"case": case, **play(made, call, how)}) + "\n")
            sys.stdout.flush()


def play(made: Emulator, call: str, how: str) -> dict[str, Any]:
    door = made.hosts.cloud.door
    name = f"{call.lower()}-{how}"[:40]
    killed = how == "killed"
    fault = Fault(action=call, code="UnauthorizedOperation", message="injected", status=403, times=99)
    door.inject(fault if how == "fails" else Fault(action=call, lose_reply=True, times=99 if killed else 1))
    before = len(door.fired)
    with start(made, name) as process:
        if killed:
            while len(door.fired) == before and process.poll() is None:
                threading.Event().wait(0.05)
            process.kill()  # the call was made, and nobody heard its answer
        said, _ = process.communicate()
    first = {"rc": process.returncode, "said": said.splitlines()[-8:], "left": left(made)}
    door.heal()
    with start(made, name) as process:
        said, _ = process.communicate()
    second = {"rc": process.returncode, "said": said.splitlines()[-8:], "left": left(made)}
    return {"fired": len(door.fired) - before, "first": first, "second": second}


def start(made: Emulator, name: str) -> subprocess.Popen[str]:
    config = {**json.loads(Path("examples/digits.json").read_text()), "num_epochs": 1}
    settings = {"name": name, "training.config": json.dumps(config)}
    settings |= {f"pool.{key}": value for key, value in made.settings(IMAGE).items()}
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "flows.cli", "train", "examples/digits.yaml", *given]
    return subprocess.Popen(
        [*command, "--runs", str(made.mount / "runs")],
        env={
            **os.environ,
            "AWS_ACCESS_KEY_ID": CREDENTIALS["aws_access_key_id"],
            "AWS_SECRET_ACCESS_KEY": CREDENTIALS["aws_secret_access_key"],
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def left(made: Emulator) -> list[str]:
    """Return what an account still has of runs: instances and launch-template versions."""
    made.hosts.wait()
    instances = [one.id for one in made.hosts.cloud.instances() if one.state != "terminated"]
    for backend in made.hosts.cloud.backends():
        for template in backend.launch_templates.values():
            instances += [f"version {version.number}" for version in template.versions if version.number > 1]
    return instances


if __name__ == "__main__":
    main()
