"""Commands of `classy_train.py`, as its documentation and the ElasticJob samples still write them.

Classy Vision 0.7.0 itself refuses `--device` and `--num_workers`, and without
`--distributed_backend ddp` its workers each train a model of their own. Here such a command
becomes a job, with a note for everything that was changed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from elastic_core.errors import RefusedInput
from elastic_core.model.job import ScriptTraining

_DROPPED: Final = {
    "device": "a GPU is used where there is one",
    "distributed_backend": "workers always train one model together",
    "checkpoint_folder": "checkpoints are set by the job's checkpoint section",
    "checkpoint_period": "checkpoints are set by the job's checkpoint section",
    "checkpoint_load_path": "the job's resume decides",
    "log_freq": "progress is told by time",
    "show_progress": "progress is always told",
    "skip_tensorboard": "there is none",
    "visdom_server": "the loss curve is in the run's report",
    "visdom_port": "the loss curve is in the run's report",
    "profiler": "it does not run on this torch",
}
_FLAGS_WITHOUT_VALUE: Final = ("show_progress", "skip_tensorboard", "profiler")


@dataclass(frozen=True, slots=True)
class Command:
    """A command line of `classy_train.py`, understood.

    Attributes:
        config: Path of its config.
        num_workers: Loader processes, None if not given.
        notes: One line for each flag that was moved or dropped.
    """

    config: str
    num_workers: int | None
    notes: tuple[str, ...]

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config with what the command line says of it."""
        changed = copy.deepcopy(dict(config))
        if self.num_workers is not None:
            for section in changed.get("dataset", {}).values():
                section["num_workers"] = self.num_workers
        return changed


def is_classy_train(script: str) -> bool:
    """Return whether a script is Classy Vision's own entry point."""
    return PurePath(script).name == "classy_train.py"


def read_command(args: Sequence[str]) -> Command:
    """Understand the arguments of `classy_train.py`.

    Raises:
        RefusedInput: A flag is unknown, or there is no config.
    """
    config, workers, notes = "", None, []
    problems = []
    for flag, value in _flags(args):
        match flag:
            case "config_file" | "config":
                config = value
            case "num_workers" if value.isdigit():
                workers = int(value)
                notes.append(f"--num_workers={value}: moved to num_workers of dataset.train and dataset.test")
            case _ if flag in _DROPPED:
                notes.append(f"--{flag}: dropped, {_DROPPED[flag]}")
            case _:
                problems.append(f"argument --{flag} {value}".rstrip() + ": is not known to classy_train.py")
    if not config:
        problems.append("argument --config_file: is required: the path of a Classy Vision JSON config")
    if problems:
        raise RefusedInput(problems)
    return Command(config, workers, tuple(notes))


def suggest(training: ScriptTraining) -> str:
    """Return what to write instead of a job that runs `classy_train.py` as a script."""
    try:
        command = read_command(training.args)
    except RefusedInput as refusal:
        why = "; ".join(refusal.problems)
        return f"training.script: use training.kind: classy instead of classy_train.py ({why})"
    notes = "; ".join(["", *command.notes])
    return (
        "training.script: classy_train.py starts again from epoch ends and is not elastic: "
        f"write training.kind: classy with config: {command.config}{notes}"
    )


def _flags(args: Sequence[str]) -> list[tuple[str, str]]:
    """Return flags with their values; both `--flag=value` and `--flag value`, dashes or underscores."""
    found, rest = [], list(args)
    while rest:
        flag, separator, value = rest.pop(0).removeprefix("--").partition("=")
        flag = flag.replace("-", "_")
        takes_value = flag not in _FLAGS_WITHOUT_VALUE and not separator
        if takes_value and rest and not rest[0].startswith("--"):
            value = rest.pop(0)
        found.append((flag, value))
    return found
