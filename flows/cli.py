"""The command line `elastic-train`.

Heavy imports (Prefect: a second and more) happen inside the commands that need
them, after the input was found good: a mistake is told at once, and nothing is
started for it.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.exits import ExitCode
from elastic_core.model.job import AwsPool, JobSpec
from elastic_core.model.job_file import parse_job, read_mapping
from flows.base import base
from flows.retraining import Where, models, parse_gate, retrain_here
from tasks import prefect_server, prefect_worker
from tasks.overrides import apply_overrides
from tasks.prefect_notice import notify_on_failures
from tasks.prefect_server import HOME
from tasks.reconcile import Scope
from tasks.registry.choice import MODELS
from tasks.runs import RUNS, NoSuchRun, find_run

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train image classifiers on machines that come and go, and lose nothing.",
)
server = typer.Typer(no_args_is_help=True, help="The local Prefect server: its UI shows runs, past ones too.")
app.add_typer(server, name="server")
app.add_typer(models, name="models")
app.add_typer(base, name="base")

JobFile = Annotated[Path, typer.Argument(help="YAML file of the job.", show_default=True)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a value of the job: nodes.target=3. Repeatable."),
]
RunsDirectory = Annotated[Path, typer.Option("--runs", help="Directory of all runs' directories.")]
Pool = Literal["local", "docker", "aws"]
RunName = Annotated[str, typer.Argument(help="Id of a run; default: the one worked on last.")]


@app.command()
def train(
    job_file: JobFile = Path("examples/digits.yaml"),
    settings: Settings = None,
    run_id: Annotated[
        str,
        typer.Option(help="Run to go on with, or to make; default: the job's unfinished one, or a new one."),
    ] = "",
    max_time: Annotated[
        float, typer.Option(help="Stop, resumable, after so many seconds; 0: no limit.", min=0)
    ] = 0,
    runs: RunsDirectory = RUNS,
) -> None:
    """Train a job; Ctrl-C saves and stops, and the same command goes on."""
    typer.echo(f"checking {job_file}")  # takes seconds where the job is new
    job = _good_job(job_file, settings)
    from flows.session import train_here
    from tasks.validate import check_runs

    check_runs(job, runs)

    raise typer.Exit(train_here(job, run_id=run_id, max_time=max_time, runs=runs))


@app.command()
def retrain(
    job_file: JobFile = Path("examples/digits.yaml"),
    settings: Settings = None,
    gate: Annotated[
        list[str] | None,
        typer.Option("--gate", metavar="RULE=VALUE", help="A rule of the gate: min_gain=0.01. Repeatable."),
    ] = None,
    registry: Where = MODELS,
    force: Annotated[bool, typer.Option("--force", help="Train even where nothing is new.")] = False,
    runs: RunsDirectory = RUNS,
) -> None:
    """Train a job again if its data are new, from the champion on; promote what passes the gate."""
    typer.echo(f"checking {job_file}")
    job, rules = _good_job(job_file, settings), parse_gate(gate or [])
    raise typer.Exit(retrain_here(job, rules, registry=registry, force=force, runs=runs))


@app.command()
def validate(job_file: JobFile = Path("examples/digits.yaml"), settings: Settings = None) -> None:
    """Tell every mistake of a job at once, and start nothing."""
    job = _good_job(job_file, settings)
    typer.echo(f"{job_file}: job {job.name!r} is good: {job.nodes.target} nodes on pool {job.pool.kind}")


@app.command(name="import", no_args_is_help=True)
def import_job(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE | -- COMMAND",
            help="Job file of another launcher, or its command line; petctl's comes after its file.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Job file to write; default: standard output.")
    ] = None,
    pool: Annotated[str, typer.Option(help="local or docker, instead of the format's usual pool.")] = "",
    data: Annotated[str, typer.Option(help="Directory of the images, if a config names another one.")] = "",
) -> None:
    """Make a job file of an ElasticJob, a PyTorchJob, petctl specs, a torchrun command and others.

    What is changed or dropped is told with its line and the reason; the job is for `elastic-train validate`.
    """
    from tasks.importers.importing import import_command, import_file, is_command, pool_named, write_new

    wanted = pool_named(pool)
    if is_command(source):
        imported = import_command(source, pool=wanted, data=data)
    else:
        imported = import_file(Path(source[0]), source[1:], pool=wanted, data=data)
    for warning in imported.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if output is None:
        typer.echo(imported.text(), nl=False)
    else:
        write_new(output, imported.text())
        typer.echo(f"wrote {output}; check it: elastic-train validate {output}", err=True)


@app.command()
def demo(
    job_file: JobFile = Path("examples/digits.yaml"), settings: Settings = None, runs: RunsDirectory = RUNS
) -> None:
    """Kill a node in mid-epoch, watch training go on, and prove that nothing was lost."""
    job = _good_job(job_file, settings)
    from flows.demo import demonstrate

    raise typer.Exit(demonstrate(job, runs=runs))


@app.command()
def status(run: RunName = "", runs: RunsDirectory = RUNS) -> None:
    """Show where a run stands."""
    from flows.status import show_status

    show_status(run, runs)


@app.command()
def logs(
    run: RunName = "",
    node: Annotated[str, typer.Option(help="Of this node only, as `status` names it.")] = "",
    lines: Annotated[int, typer.Option(help="Last lines of each log.", min=0)] = 20,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run is over.")] = False,
    runs: RunsDirectory = RUNS,
) -> None:
    """Show what the nodes of a run said, agents and workers."""
    from flows.examination import show_logs

    show_logs(run, runs, node=node, lines=lines, follow=follow)


@app.command()
def doctor(
    pool: Annotated[Pool, typer.Option(help="Where you want to train.")] = "local",
    store: Annotated[str, typer.Option(metavar="HOST:PORT", help="An etcd of yours to look at.")] = "",
    cluster: Annotated[str, typer.Option(metavar="CLUSTER@REGION", help="With --pool aws.")] = "",
    runs: RunsDirectory = RUNS,
) -> None:
    """Check this machine: programs, disk, ports, network, clock, server; a remedy for what is bad."""
    from flows.examination import examine_here

    scope = _scope(runs, docker=False, aws=[cluster] if cluster else None)
    aws = next(iter(scope.aws), None)
    raise typer.Exit(examine_here(runs=runs, pool=pool, store=store, aws=aws))


@app.command(name="export")
def export_model(
    run: RunName = "",
    form: Annotated[
        Literal["torch-export", "torchscript"],
        typer.Option("--format", help="For new code; TorchScript for old one."),
    ] = "torch-export",
    output: Annotated[Path | None, typer.Option(help="The file; default: beside the run's weights.")] = None,
    runs: RunsDirectory = RUNS,
) -> None:
    """Write a run's trained model as one file that needs neither its source nor this program.

    The file is read again and compared with the model before it is kept. Weights, classes and
    preprocessing lie beside it, in `model.pt` and `config.json`.
    """
    from tasks.graph import model_of, write_graph

    typer.echo(f"model: {write_graph(model_of(find_run(runs, run)), form, output)}")


@app.command()
def stop(run: Annotated[str, typer.Argument(help="Id of the run.")], runs: RunsDirectory = RUNS) -> None:
    """Let a run save its state and end; it can go on later."""
    from flows.status import request_stop

    request_stop(run, runs)


@app.command()
def fence(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    node: Annotated[str, typer.Argument(help="Name of the node, as `status` shows it.")],
    runs: RunsDirectory = RUNS,
) -> None:
    """End a node's membership at once: the others go on; a living one comes back as a new node."""
    from flows.status import fence_node

    fence_node(run, node, runs)


@app.command()
def scale(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    target: Annotated[int, typer.Option(help="Nodes to have; 0: as now, within the bounds.", min=0)] = 0,
    least: Annotated[int, typer.Option("--min", help="Training waits below so many.", min=0)] = 0,
    most: Annotated[int, typer.Option("--max", help="No more nodes than so many.", min=0)] = 0,
    wait: Annotated[float, typer.Option(help="Wait so many seconds for the new generation.", min=0)] = 0,
    runs: RunsDirectory = RUNS,
) -> None:
    """Let a running job grow or shrink; no step is lost."""
    from elastic_core.rescale.decision import Rescale
    from tasks.rescale import rescale

    wish = Rescale(target=target, min=least, max=most)
    typer.echo(rescale(runs, run, wish, wait_s=wait).headline())


@app.command()
def reconcile(
    apply: Annotated[bool, typer.Option("--apply", help="End what no run owns; else only tell.")] = False,
    abandoned_after: Annotated[
        float, typer.Option(help="A run that no flow drives for so many seconds is given up.", min=0)
    ] = 3600,
    docker: Annotated[bool, typer.Option(help="Look at this machine's Docker engine too.")] = True,
    aws: Annotated[
        list[str] | None, typer.Option(metavar="CLUSTER@REGION", help="Look at a cluster's instances too.")
    ] = None,
    runs: RunsDirectory = RUNS,
) -> None:
    """Find what no run owns any more: processes, containers, networks, instances."""
    from flows.upkeep import reconcile_here

    raise typer.Exit(reconcile_here(_scope(runs, docker, aws), apply=apply, abandoned_after=abandoned_after))


@app.command()
def teardown(
    run: Annotated[str, typer.Argument(help="Id of the run.")],
    docker: Annotated[bool, typer.Option(help="Look at this machine's Docker engine too.")] = True,
    aws: Annotated[
        list[str] | None, typer.Option(metavar="CLUSTER@REGION", help="Look at a cluster's instances too.")
    ] = None,
    runs: RunsDirectory = RUNS,
) -> None:
    """End everything that a run has, in every pool; its directory stays, and it can go on later."""
    from flows.upkeep import teardown_here

    raise typer.Exit(teardown_here(run, _scope(runs, docker, aws)))


@app.command(name="runs")
def list_runs(runs: RunsDirectory = RUNS) -> None:
    """List all runs, the one worked on last first."""
    from flows.status import show_runs

    show_runs(runs)


@server.command()
def up(
    port: Annotated[int | None, typer.Option(help="Port; default: 4200 or the next free one.")] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; one that others can reach needs a password.")
    ] = prefect_server.LOOPBACK,
    deploy: Annotated[
        bool, typer.Option("--deploy", help="Deploy all of prefect.yaml, and start a worker that runs it.")
    ] = False,
    notify: Annotated[
        str,
        typer.Option(
            metavar="TYPE/NAME",
            help="Block of this server to tell when three trainings fail within an hour: slack-webhook/team.",
        ),
    ] = "",
) -> None:
    """Start the server, and keep it running."""
    record = prefect_server.begin(port=port, host=host)
    prefect_server.wait_healthy(record)
    typer.echo(f"Prefect UI: {record.url}  (stop it with `make down`)")
    if notify:
        typer.echo(notify_on_failures(record, notify))
    if deploy:
        for name in prefect_worker.deploy_all(record):
            typer.echo(f"deployed: {name}")
        prefect_worker.begin(record)
        typer.echo(f"a worker runs them; its log: {prefect_worker.log_of(HOME)}")
        prefect = Path(sys.executable).with_name("prefect")
        typer.echo(f"try: PREFECT_API_URL={record.api} {prefect} deployment run elastic-train/elastic-train")


@server.command()
def down() -> None:
    """Stop the worker and the server; their data stay. Nodes of a run train on, and are adopted later."""
    if prefect_worker.stop():
        typer.echo("stopped the worker")
    record = prefect_server.stop()
    told = f"stopped the Prefect server on port {record.port}" if record else "no Prefect server was running"
    typer.echo(told)


@server.command(name="status")
def server_status() -> None:
    """Tell whether the server runs, and where."""
    record = prefect_server.status()
    if record is None:
        typer.echo("no Prefect server is running; start it with `make up`")
    else:
        typer.echo(f"{record.url}: {'healthy' if prefect_server.is_healthy(record) else 'starting'}")


def _scope(runs: Path, docker: bool, aws: list[str] | None) -> Scope:
    """Return where to look.

    Raises:
        RefusedInput: A cluster is not written as `CLUSTER@REGION`.
    """
    from pydantic import ValidationError

    pools = []
    for text in aws or ():
        cluster, _, region = text.partition("@")
        try:
            pools.append(AwsPool(cluster=cluster, region=region))
        except ValidationError as error:
            raise RefusedInput([f"--aws {text!r}: write CLUSTER@REGION, as in elastic@us-west-2"]) from error
    return Scope(runs=str(runs), docker=docker, aws=tuple(pools))


def _good_job(job_file: Path, settings: list[str] | None) -> JobSpec:
    """Return the job of a file with settings applied and checked, its files read in.

    Raises:
        RefusedInput: All mistakes.
    """
    from tasks.validate import check, resolve

    job = resolve(parse_job(apply_overrides(read_mapping(job_file), settings or []), str(job_file)))
    check(job, HOME)
    return job


def main() -> None:
    """Run the command line; every error ends in one line a problem and a documented exit code."""
    # A shell's background job ignores SIGINT, and so would we: a stop must always be possible.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("PREFECT_HOME", str((HOME / "prefect").absolute()))
    try:
        app()
    except RefusedInput as refusal:
        _fail(refusal.problems, ExitCode.REFUSED)
    except NoSuchRun as missing:
        _fail([str(missing)], ExitCode.NO_SUCH_RUN)
    except ElasticError as error:
        _fail(str(error).splitlines(), ExitCode.FAILED)


def _fail(lines: list[str] | tuple[str, ...], code: ExitCode) -> None:
    for line in lines:
        typer.echo(line, err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
