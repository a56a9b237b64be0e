"""The program of a Classy Vision worker, and what can be done with its job without an agent.

python -m elastic_core.trainer run                  in an agent's worker: train as told
python -m elastic_core.trainer solo JOB.yaml        alone, undisturbed: the reference
python -m elastic_core.trainer validate JOB.yaml    tell every mistake of a job
python -m elastic_core.trainer score JOB.yaml DIR   try a trained model on the job's held-out data
python -m elastic_core.trainer graph DIR FORMAT     write a trained model as one file, without its source
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from elastic_core.errors import RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.model.job_file import load_job


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the commands and return its exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code: int = arguments.command(arguments)
    except RefusedInput as refusal:
        if arguments.command is _run:
            raise  # the runner tells the agent
        return _refuse(refusal.problems, as_json=getattr(arguments, "json", False))
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m elastic_core.trainer", description=__doc__.splitlines()[0]
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="train as the agent of this node tells")
    run.set_defaults(command=_run)
    solo = commands.add_parser("solo", help="train alone, without an agent")
    solo.add_argument("job", type=Path, help="YAML file of the job")
    solo.add_argument("--run-dir", type=Path, required=True, help="for metrics.jsonl and model/")
    solo.set_defaults(command=_solo)
    validate = commands.add_parser("validate", help="tell every mistake of a job, and start nothing")
    validate.add_argument("job", type=Path, help="YAML file of the job")
    validate.add_argument("--json", action="store_true", help="print one JSON object")
    validate.add_argument("--cache", type=Path, help="directory that remembers jobs that were good")
    validate.set_defaults(command=_validate)
    score = commands.add_parser("score", help="try a trained model on the job's held-out data")
    score.add_argument("job", type=Path, help="YAML file of the job")
    score.add_argument("model", type=Path, help="directory of an exported model")
    score.add_argument("--json", action="store_true", help="print the score as one JSON object")
    score.set_defaults(command=_score)
    graph = commands.add_parser("graph", help="write a trained model as one file, without its source")
    graph.add_argument("model", type=Path, help="directory of an exported model")
    graph.add_argument("format", choices=("torch-export", "torchscript"))
    graph.add_argument("--output", type=Path, help="the file; default: beside the model's weights")
    graph.set_defaults(command=_graph)
    return parser


# Classy Vision takes seconds to import and no command needs it before its arguments are read, so
# its modules are imported by name here. In a forked worker they are there already.


def _run(_: argparse.Namespace) -> int:
    code: int = _module("worker").run_worker(os.environ)
    return code


def _solo(arguments: argparse.Namespace) -> int:
    job = load_job(arguments.job)
    results = _module("worker").run_solo(job, Path.cwd(), arguments.run_dir)
    _say(" ".join(f"{name}={value:.4f}" for name, value in results.items()))
    _say(f"model: {arguments.run_dir / 'model'}")
    return ExitCode.OK


def _validate(arguments: argparse.Namespace) -> int:
    job = load_job(arguments.job)
    verdict = import_module("elastic_core.trainer.classy.validate").judge(
        job, Path.cwd(), cache=arguments.cache
    )
    if verdict.problems:
        return _refuse(verdict.problems, as_json=arguments.json)
    _say(
        json.dumps({"problems": [], "summary": verdict.summary})
        if arguments.json
        else f"ok: {verdict.summary}"
    )
    return ExitCode.OK


def _score(arguments: argparse.Namespace) -> int:
    score = _module("scoring").score_model(load_job(arguments.job), Path.cwd(), arguments.model)
    _say(
        json.dumps(score.model_dump(mode="json"))
        if arguments.json
        else f"accuracy {score.accuracy:.2%} on {score.samples} samples"
    )
    return ExitCode.OK


def _graph(arguments: argparse.Namespace) -> int:
    _say(str(_module("graph").write_graph(arguments.model, arguments.format, arguments.output)))
    return ExitCode.OK


def _module(name: str) -> Any:
    return import_module(f"elastic_core.trainer.classy.{name}")


def _refuse(problems: Sequence[str], *, as_json: bool) -> int:
    if as_json:
        _say(json.dumps({"problems": list(problems)}))
    else:
        for problem in problems:
            sys.stderr.write(f"{problem}\n")
    return ExitCode.REFUSED


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")


if __name__ == "__main__":
    sys.exit(main())
