"""The pages of `docs/reference`, made from the code."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main

from elastic_core.agent.arguments import parse_arguments
from elastic_core.events.report import RunReport
from elastic_core.model.job import JobSpec
from flows.cli import app
from flows.metrics import figures_of
from tests.docs.schemas import sections
from tests.docs.sources import ROOT, Word, enum_words, facts, module_docstring
from tests.flows.test_live import progress, snapshot

PLACE = ROOT / "docs" / "reference"
_NOTE = "<!-- Made from the code by `python -m tests.docs --update`; change the code, not this page. -->\n\n"


def pages() -> dict[Path, str]:
    """Return the text that each page of the reference should have."""
    made = {
        "job.md": job_page(),
        "commands.md": commands_page(),
        "agent.md": agent_page(),
        "exit-codes.md": exit_codes_page(),
        "events.md": events_page(),
        "keys.md": keys_page(),
        "metrics.md": metrics_page(),
        "report.md": report_page(),
    }
    return {PLACE / name: f"{_NOTE}{text.rstrip()}\n" for name, text in made.items()}


def job_page() -> str:
    """Return the page of the job file."""
    head = (
        "# The job file\n\nYAML; every key has a default but those marked required. `elastic-train validate` "
        "tells every mistake at once, `--set path.to.key=value` changes single values.\n\n"
    )
    return head + "".join(sections(JobSpec.model_json_schema(), limits=True))


def report_page() -> str:
    """Return the page of `report.json`."""
    head = (
        "# Fields of report.json\n\nWhat the classes of the ledger and the sample audit mean is told in "
        "[the report of a run](../report.md); the schema is [report.schema.json](../report.schema.json).\n\n"
    )
    return head + "".join(sections(RunReport.model_json_schema(), limits=False))


def commands_page() -> str:
    """Return the page of the command line."""
    group: Any = typer.main.get_command(app)
    text = "# elastic-train\n\n" + (group.help or "") + "\n\n"
    return text + "".join(_command(f"elastic-train {name}", command) for name, command in _leaves(group))


def agent_page() -> str:
    """Return the page of the agent's flags."""
    said = io.StringIO()
    narrow = mock.patch.dict(os.environ, {"COLUMNS": "100"})
    with narrow, contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        parse_arguments(["--help"])
    return (
        "# elastic-agent\n\nOne agent runs on each node. Flags are known with dashes and with underscores, "
        "and as torchrun's variables: `PET_NNODES` for `--nnodes`.\n\n"
        f"```text\n{said.getvalue().rstrip()}\n```\n"
    )


def exit_codes_page() -> str:
    """Return the page of exit codes."""
    words = enum_words("elastic_core/exits.py", "ExitCode")
    rows = [(f"`{word.value}`", word.name.lower().replace("_", " "), word.text) for word in words]
    return (
        "# Exit codes\n\nOne table for flows, agents and commands. A script's own code is passed through "
        "unchanged, and a signal *n* becomes 128 + *n*: 137 is SIGKILL. What to do at each is in "
        "[the runbook](../operations.md).\n\n" + _table(("code", "name", "meaning"), rows)
    )


def events_page() -> str:
    """Return the page of causes, outcomes, phases and facts."""
    membership = "elastic_core/model/membership.py"
    agent, coordinator = "elastic_core/agent/events.py", "elastic_core/rendezvous/events.py"
    parts = [
        ("Causes of a generation", _values(enum_words(membership, "Cause"))),
        ("Outcomes of a run", _values(enum_words(membership, "Outcome"))),
        ("Phases of a node", _values(enum_words("elastic_core/model/node.py", "NodePhase"))),
        ("What an agent is told", _facts(facts(agent, "# ---- events", "# ---- commands"))),
        ("What an agent asks for", _facts(facts(agent, "# ---- commands", ""))),
        ("What the coordinator is told", _facts(facts(coordinator, "# ---- events", "# ---- commands"))),
        ("What the coordinator asks for", _facts(facts(coordinator, "# ---- commands", ""))),
    ]
    head = (
        "# Events\n\nCauses, outcomes and phases are in etcd, in the report and in `elastic-train status`; "
        "facts and commands are in the [traces](../protocol.md) of agent and coordinator.\n\n"
    )
    return head + "".join(f"## {title}\n\n{table}\n" for title, table in parts)


def keys_page() -> str:
    """Return the page of the keys in etcd."""
    first, _, rest = module_docstring("elastic_core/store/keys.py").partition("\n\n")
    layout, _, after = rest.partition("\n\n")
    body = "\n".join(line.strip() for line in layout.splitlines())
    return f"# Keys in etcd\n\n{first}\n\n```text\n{body}\n```\n\n{after}\n"


def metrics_page() -> str:
    """Return the page of what Prometheus reads."""
    with tempfile.TemporaryDirectory() as directory:
        told = replace(progress(40), metrics={"loss": 0.4, "images_per_s": 100, "accuracy": 0.9})
        shown = snapshot(Path(directory), told)
        manifest = shown.attempt.directory.path / "checkpoints" / "step-00000020-a1-g1" / "manifest.json"
        manifest.parent.mkdir(parents=True)
        manifest.touch()
        rows = []
        for metric in figures_of(shown, now=120.0):
            suffix = "_total" if metric.type == "counter" else ""
            labels = {label for sample in metric.samples for label in sample.labels}
            rows.append((f"`{metric.name}{suffix}`", ", ".join(sorted(labels)), metric.documentation))
    return (
        "# Metrics\n\nWhat a run answers Prometheus with, at `metrics.port` of the machine of its flow "
        "([the key](job.md#metrics)). `infra/grafana/elastic-train.json` is a dashboard of it.\n\n"
        + _table(("name", "labels", "meaning"), sorted(rows))
    )


def _leaves(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _leaves(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def _command(name: str, command: Any) -> str:
    rows = []
    for parameter in command.params:
        is_option = parameter.param_type_name == "option"
        spelt = (
            ", ".join(f"`{option}`" for option in parameter.opts) if is_option else f"`{_metavar(parameter)}`"
        )
        default = (
            "" if parameter.default in (None, "", [], ()) or parameter.required else f"`{parameter.default}`"
        )
        rows.append((spelt, default, parameter.help or ""))
    text = "\n\n".join(" ".join(part.split()) for part in (command.help or "").split("\n\n"))
    return f"## {name}\n\n{text}\n\n" + (
        _table(("argument", "default", "meaning"), rows) + "\n" if rows else ""
    )


def _metavar(parameter: Any) -> str:
    return str(parameter.metavar or parameter.name.upper())


def _values(words: Iterable[Word]) -> str:
    return _table(("value", "meaning"), [(f"`{word.value}`", word.text) for word in words])


def _facts(words: Iterable[Word]) -> str:
    return _table(("name", "meaning"), [(f"`{word.name}`", word.text) for word in words])


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines)
