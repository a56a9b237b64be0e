"""Incidents on the emulator's stage: what spot machines meet, once training goes on as it should."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

from moto.ec2.models.instances import Instance

from tasks.emulator.hosts import Hosts
from tasks.providers.aws.inventory import ROLE_TAG

Incident = Literal["spot", "crash"]

NOTICE: Final = timedelta(seconds=20)
"""Between notice and end; AWS gives two minutes, and the story is the same."""

CALM_STEPS: Final = 20
"""Steps that training goes on between two incidents."""

_LOOK_S: Final = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Lets incidents happen to the machines of whatever trains now.

    Attributes:
        runs: Directory of all runs' directories; their metrics tell where training is.
        events: An `events` client of the machines' region.
        say: Told each incident.
        over: Set when nothing will train any more.
    """

    hosts: Hosts
    runs: Path
    events: Any
    say: Callable[[str], None]
    over: threading.Event

    def play(self, incidents: Sequence[Incident]) -> None:
        """Let the incidents happen one after the other, each once training is calm."""
        began = time.time()
        for incident in incidents:
            names = self._calm_machines(began)
            if not names:
                self.say(f"training was over before {incident} could happen: let it train longer")
                return
            victim = names[0]
            if incident == "spot":
                self.say(
                    f"on stage: a spot notice for {victim}, which goes in {NOTICE.total_seconds():.0f} s"
                )
                self.hosts.interrupt(victim, self.events, NOTICE)
            else:
                self.say(f"on stage: the host of {victim} fails")
                self.hosts.crash(victim)
            began = time.time()

    def _calm_machines(self, began: float) -> list[str]:
        """Return the training machines, once all of them have trained for some steps; none at the end."""
        while not self.over.wait(_LOOK_S):
            machines = sorted(self._machines(), key=lambda machine: str(machine.launch_time))
            steps = [line for line in self._newest_lines() if line["wall_time"] > began]
            worlds = [line.get("world_size", 0) for line in steps[-CALM_STEPS:]]
            if len(machines) > 1 and len(worlds) == CALM_STEPS and min(worlds) >= len(machines):
                return [machine.id for machine in machines]
        return []

    def _machines(self) -> list[Instance]:
        return [
            machine
            for machine in self.hosts.cloud.instances()
            if machine.state == "running"
            and any(tag["key"] == ROLE_TAG and tag["value"] == "node" for tag in machine.get_tags())
        ]

    def _newest_lines(self) -> list[dict[str, Any]]:
        """Return the newest run's finished steps."""
        files = sorted(self.runs.glob("*/metrics.jsonl"), key=lambda path: path.stat().st_mtime)
        if not files:
            return []
        lines = [json.loads(line) for line in files[-1].read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if "evaluation" not in line]
