"""Incidents on the emulator's stage: what spot machines meet, once training goes on as it should."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence, Set
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

_LEAVE_AND_JOIN: Final = 2
"""Generations after a notice: the machine leaves, and its replacement joins, in either order."""

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
        began, warned, generation = time.time(), set[str](), 0
        for incident in incidents:
            names, seen = self._calm_machines(began, warned, generation)
            if not names:
                self.say(f"training was over before {incident} could happen: let it train longer")
                return
            victim = names[0]
            if incident == "spot":
                self.say(
                    f"on stage: a spot notice for {victim}, which goes in {NOTICE.total_seconds():.0f} s"
                )
                self.hosts.interrupt(victim, self.events, NOTICE)
                warned.add(victim)
                generation = seen + _LEAVE_AND_JOIN
            else:
                self.say(f"on stage: the host of {victim} fails")
                self.hosts.crash(victim)
                generation = seen + 1
            began = time.time()

    def _calm_machines(self, began: float, warned: Set[str], generation: int) -> tuple[list[str], int]:
        """Return the training machines that may stay, and their generation; none at the end.

        Args:
            began: Steps before this do not count.
            warned: Machines that were told to go: training goes on without them before it is calm.
            generation: The least that can be calm.
        """
        while not self.over.wait(_LOOK_S):
            machines = sorted(self._machines(), key=lambda machine: str(machine.launch_time))
            names = [machine.id for machine in machines if machine.id not in warned]
            steps = [line for line in self._newest_lines() if line["wall_time"] > began][-CALM_STEPS:]
            worlds = {(line.get("world_size", 0), line["generation"]) for line in steps}
            if len(names) > 1 and len(steps) == CALM_STEPS and len(worlds) == 1:
                ((world, current),) = worlds
                if world == len(names) and current >= generation:
                    return names, current
        return [], generation

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
