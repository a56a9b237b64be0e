"""What the documentation shows can be typed: commands exist with those flags, job files are accepted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml

from elastic_core.agent.arguments import parse_arguments
from elastic_core.errors import RefusedInput
from elastic_core.model.job import JobSpec
from elastic_core.model.job_file import parse_job
from flows.cli import app
from tests.docs.fences import Fence, fences
from tests.docs.sources import ROOT

COMMANDS = [(fence, words) for fence in fences() for words in fence.commands()]
YAML = [fence for fence in fences() if fence.language == "yaml" and fence.mark != "not a job"]
_ABSENT = re.compile(r"there is no such file|cannot be read|has no password")
TO_RUN = [fence for fence in fences() if fence.mark == "run"]


def named(value: Any) -> str:
    return " ".join(value) if isinstance(value, list) else str(value)


def check_train(words: list[str]) -> None:
    command: Any = typer.main.get_command(app)
    rest = words[1:]
    while hasattr(command, "commands"):
        assert rest, f"{' '.join(words)}: names no command"
        assert rest[0] in command.commands
        command = command.commands[rest.pop(0)]
    command.make_context(command.name, rest)


def check_agent(words: list[str]) -> None:
    """Read the flags; a script or file that only a reader has is no mistake here."""
    problems: tuple[str, ...] = ()
    try:
        parse_arguments(words[1:], {}, device_count=0)
    except RefusedInput as refusal:
        problems = refusal.problems
    assert [one for one in problems if not _ABSENT.search(one)] == []


def check_make(words: list[str]) -> None:
    text = (ROOT / "Makefile").read_text()
    for word in words[1:]:
        name, equals, _ = word.partition("=")
        pattern = rf"^{name} \??=" if equals else rf"^{name}:"
        assert re.search(pattern, text, re.MULTILINE), f"make knows no {name}"


def check_python(words: list[str]) -> None:
    assert words[1] == "-m"
    assert find_spec(words[2]), f"there is no module {words[2]}"


CHECKS = {
    "elastic-train": check_train,
    "elastic-agent": check_agent,
    "make": check_make,
    "python": check_python,
}


@pytest.mark.case("L05")
@pytest.mark.parametrize(("fence", "words"), COMMANDS, ids=named)
def test_a_command_of_the_documentation_is_accepted(fence: Fence, words: list[str]) -> None:
    CHECKS[words[0]](words)


@pytest.mark.parametrize("fence", YAML, ids=named)
def test_a_job_file_of_the_documentation_is_accepted(fence: Fence) -> None:
    data = yaml.safe_load(fence.text)
    assert data.keys() <= JobSpec.model_fields.keys(), "mark it: <!-- not a job -->"
    parse_job(data, str(fence))


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_an_example_is_accepted(path: Path) -> None:
    parse_job(yaml.safe_load(path.read_text()), str(path))


def test_the_checks_see_what_is_wrong() -> None:
    for words in (["elastic-train", "trian"], ["make", "trian"], ["make", "train", "JOBS=x"]):
        with pytest.raises(AssertionError):
            CHECKS[words[0]](words)
    with pytest.raises(Exception, match="No such option"):
        check_train(["elastic-train", "train", "--seet", "a=b"])
    with pytest.raises(AssertionError):
        check_agent(["elastic-agent", "--nnode-count=2", "train.py"])


@pytest.mark.slow
@pytest.mark.parametrize("fence", TO_RUN, ids=named)
def test_a_block_that_is_marked_runs(fence: Fence, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    starter = programs / "elastic-train"
    starter.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flows.cli "$@"\n')
    starter.chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()
    (work / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    script = "set -e\n" + fence.text
    done = subprocess.run(
        ["bash", "-c", script], cwd=work, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
