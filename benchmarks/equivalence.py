"""The same model, whatever happened: random membership traces on a real training, beside an undisturbed one.

    python -m benchmarks.equivalence --traces 50 --json -

A trace is a random sequence of joins, drains, killed workers and losses of the whole run, at random
steps. Workers are real processes with real collectives and checkpoints; the training has BatchNorm,
dropout, an average of weights (EMA), clipping, micro-batches, and mixup or label smoothing. Half of
the traces reduce in a fixed order (`deterministic`): then weights must be bitwise the same.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Final, Literal

import torch

from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from elastic_core.events.audit import SampleAudit, fold_audit
from elastic_core.events.lines import parse_lines
from elastic_core.model.job import CheckpointPolicy
from elastic_core.model.membership import Cause
from elastic_core.model.messages import GroupBroken, TrainingFinished
from elastic_core.testing.sessions import FORKS, Gate, Sessions, ToyNode
from elastic_core.testing.toy_worker import Act
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.solo import train_alone
from elastic_core.trainer.classy.trainee import ClassyTrainee
from elastic_core.trainer.trainee import Reducer, StepReport

SAMPLES: Final = 180
EPOCHS: Final = 4
STEPS: Final = EPOCHS * 6
NODES: Final = 4
GOAL: Final = 1e-6

Kind = Literal["join", "drain", "kill", "restart"]


# ---- what is trained -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Training:
    """A training of some seconds; crosses to worker processes."""

    mixes: bool
    deterministic: bool

    def trainee(self, before_step: Callable[[int], None]) -> ClassyTrainee:
        """Return the training, which calls back before each step."""
        # Registers the data; workers need it, and so does this process when it trains alone.
        import elastic_core.trainer.classy.datasets  # noqa: F401

        recipe = Recipe(
            config=_config(mixes=self.mixes),
            global_batch=32,
            shards=NODES,
            seed=3,
            deterministic=self.deterministic,
        )
        return _Interrupted(recipe, before_step)


class _Interrupted(ClassyTrainee):
    def __init__(self, recipe: Recipe, before_step: Callable[[int], None]) -> None:
        super().__init__(recipe)
        self._before_step: Callable[[int], None] = lambda _: None
        self._when_set_up = before_step

    def set_up(self) -> None:
        super().set_up()
        self._before_step = self._when_set_up  # the dry step of the set-up is none

    def train_step(self, reducer: Reducer) -> StepReport:
        self._before_step(self.step)
        return super().train_step(reducer)


def _config(*, mixes: bool) -> dict[str, Any]:
    data = {"name": "digits", "batchsize_per_replica": 32}
    smoothing = {"name": "label_smoothing_cross_entropy", "smoothing_param": 0.1}
    return {
        "name": "classification_task",
        "num_epochs": EPOCHS,
        "loss": {"name": "soft_target_cross_entropy"} if mixes else smoothing,
        **({"mixup": {"alpha": 0.2, "num_classes": 10}} if mixes else {}),
        "clip_grad_norm": 1.0,
        "hooks": [{"name": "ema_model_weights", "decay": 0.9}],
        "dataset": {
            "train": {**data, "split": "train", "use_shuffle": True, "num_samples": SAMPLES},
            "test": {**data, "split": "test", "use_shuffle": False, "num_samples": 60},
        },
        "meters": {"accuracy": {"topk": [1]}},
        "model": {
            "name": "mlp",
            "input_dim": 768,
            "hidden_dims": [32, 32],
            "output_dim": 10,
            "dropout": 0.2,
            "use_batchnorm": True,
        },
        "optimizer": {
            "name": "sgd",
            "momentum": 0.9,
            "weight_decay": 1e-4,
            "param_schedulers": {"lr": {"name": "cosine", "start_value": 0.05, "end_value": 0.001}},
        },
    }


# ---- what happens ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happens before a step; `node` comes or goes."""

    step: int
    kind: Kind
    node: str


@dataclass(frozen=True, slots=True)
class Attempt:
    """From a start to the end of the training, or to the loss of everything."""

    members: tuple[str, ...]
    events: tuple[Event, ...]

    @property
    def is_lost(self) -> bool:
        """Whether it ends with the loss of everything."""
        return bool(self.events) and self.events[-1].kind == "restart"


def random_trace(seed: int) -> list[Attempt]:
    """Return the attempts of a trace; a seed always means the same one."""
    chance = random.Random(seed)
    attempts, events, number = [], [], 0
    members = begin = [f"n{index}" for index in range(chance.randint(1, NODES))]
    number = len(members)
    step = chance.randint(1, 4)
    while step < STEPS - 2:
        kinds: list[Kind] = ["restart"]
        kinds += ["join", "join"] if len(members) < NODES else []
        kinds += ["drain", "kill", "kill"] if len(members) > 1 else []
        kind = chance.choice(kinds)
        if kind == "restart":
            attempts.append(Attempt(tuple(begin), (*events, Event(step, kind, ""))))
            members = begin = [f"n{number + index}" for index in range(chance.randint(1, NODES))]
            number, events = number + len(members), []
        elif kind == "join":
            events.append(Event(step, kind, f"n{number}"))
            members = [*members, f"n{number}"]
            number += 1
        else:
            events.append(Event(step, kind, chance.choice(members)))
            members = [name for name in members if name != events[-1].node]
        step += chance.randint(3, 6)
    return [*attempts, Attempt(tuple(begin), tuple(events))]


@dataclass(slots=True)
class _Player:
    """Plays one attempt."""

    run: Sessions
    attempt: Attempt
    nodes: dict[str, ToyNode] = field(default_factory=dict)
    acts: dict[str, list[Act]] = field(default_factory=dict)
    gates: dict[int, Gate] = field(default_factory=dict)

    def play(self) -> None:
        self._prepare()
        for name in self.attempt.members:
            self._start(name)
        members = list(self.attempt.members)
        self._publish(members, Cause.START)
        for event in self.attempt.events:
            members = self._happen(event, members)
        if not self.attempt.is_lost:
            self.nodes[members[0]].wait_for(TrainingFinished)

    def _prepare(self) -> None:
        """Tell each worker beforehand where it dies or waits, for that is decided in its process."""
        members = list(self.attempt.members)
        for event in self.attempt.events:
            if event.kind in ("join", "drain"):
                self.gates[event.step] = gate = self.run.gate(event.step)
                self.acts.setdefault(members[0], []).append(gate.act)
            else:
                for name in [event.node] if event.kind == "kill" else members:
                    self.acts.setdefault(name, []).append(Act(event.step, "die"))
            members = _after(event, members)

    def _happen(self, event: Event, members: list[str]) -> list[str]:
        after = _after(event, members)
        match event.kind:
            case "restart":
                for name in members:
                    self.nodes[name].exit_code()
            case "kill":
                for name in after:
                    self.nodes[name].wait_for(GroupBroken)
                self._publish(after, Cause.LOSS)
            case _:
                if event.kind == "join":
                    self._start(event.node)
                self.gates[event.step].wait()
                self._publish(after, Cause.JOIN if event.kind == "join" else Cause.DRAIN)
                self.gates[event.step].open()
        return after

    def _start(self, name: str) -> None:
        self.nodes[name] = self.run.start(name, *self.acts.get(name, ()))

    def _publish(self, members: Sequence[str], cause: Cause) -> None:
        self.run.publish(*(self.nodes[name] for name in members), cause=cause)


def _after(event: Event, members: Sequence[str]) -> list[str]:
    if event.kind == "join":
        return [*members, event.node]
    return [] if event.kind == "restart" else [name for name in members if name != event.node]


# ---- what is found ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Finding:
    """What a trace did to the model."""

    difference: float
    audit: SampleAudit
    events: int

    @property
    def is_exact(self) -> bool:
        """Whether each sample was used once in each epoch, and all of them were."""
        return self.audit.is_exact and self.audit.steps == STEPS and len(self.audit.epochs) == EPOCHS


def play(seed: int, training: Training) -> Finding:
    """Train through a random trace and compare with the undisturbed training."""
    trace = random_trace(seed)
    with tempfile.TemporaryDirectory(prefix="equivalence-") as name:
        run_dir = Path(name)
        for number, attempt in enumerate(trace, start=1):
            policy = CheckpointPolicy(every_steps=3)
            with Sessions(run_dir, training, policy=policy, attempt=number) as run:
                _Player(run, attempt).play()
        weights = torch.load(run_dir / "model" / "model.pt", weights_only=True)
        files = [parse_lines(path.read_text().splitlines()) for path in (run_dir / "samples").iterdir()]
        audit = fold_audit(files, dataset=SAMPLES, is_finished=True)
    expected = undisturbed(training)
    difference = max(
        float((weights[name].double() - expected[name].double()).abs().max()) for name in expected
    )
    return Finding(difference, audit, sum(len(attempt.events) for attempt in trace))


@cache
def undisturbed(training: Training) -> dict[str, torch.Tensor]:
    """Return the weights of the training alone."""
    torch.set_num_threads(1)  # as workers have it
    with tempfile.TemporaryDirectory(prefix="equivalence-") as name:
        train_alone(training.trainee(lambda _: None), Path(name))
        weights: dict[str, torch.Tensor] = torch.load(Path(name) / "model" / "model.pt", weights_only=True)
    return weights


def trainings() -> Iterator[Training]:
    """Yield the trainings in turn, for ever."""
    while True:
        for mixes in (True, False):
            for deterministic in (False, True):
                yield Training(mixes, deterministic)


def rows_of(findings: Sequence[tuple[Training, Finding]]) -> Iterator[Row]:
    """Yield the table's rows."""
    for deterministic in (False, True):
        found = [finding for training, finding in findings if training.deterministic is deterministic]
        if not found:
            continue
        peer = "deterministic" if deterministic else "default"
        goal = "0: bitwise" if deterministic else f"{GOAL:g}"

        def row(case: str, values: Sequence[float], unit: str, note: str = "", peer: str = peer) -> Row:
            return Row.of(values, peer=peer, case=case, unit=unit, note=note)

        yield row("largest difference of a weight", [one.difference for one in found], "", f"goal {goal}")
        yield row("samples missed", [one.audit.missed for one in found], "samples")
        yield row("samples repeated", [one.audit.repeated for one in found], "samples")
        yield row("finished steps done again", [one.audit.steps_lost for one in found], "steps")
        yield row("events of a trace", [one.events for one in found], "events")


def main() -> int:
    """Play the traces, report, and return 1 if a goal was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equivalence", description=__doc__)
    parser.add_argument("--traces", type=int, default=50, help="random traces (default 50)")
    parser.add_argument("--seed", type=int, default=0, help="of the first trace; the next has one more")
    parser.add_argument("--json", default="", help='write JSON to a file, or to standard output with "-"')
    options = parser.parse_args()
    log_to_stderr()
    facts = machine_facts()
    FORKS.set_forkserver_preload(["torch", "torch._dynamo", "elastic_core.trainer.classy.preload"])
    findings, missed = [], 0
    for seed, training in zip(range(options.seed, options.seed + options.traces), trainings(), strict=False):
        finding = play(seed, training)
        findings.append((training, finding))
        is_good = finding.is_exact and finding.difference <= (0 if training.deterministic else GOAL)
        missed += not is_good
        said = "" if is_good else "  MISSED"
        sys.stderr.write(f"trace {seed}: {finding.events} events, {finding.difference:.3g}{said}\n")
    print_report(list(rows_of(findings)), options.json, facts=facts)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
