"""The commands `elastic-train base …`: what outlives every job on AWS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from tasks.cluster_base import MODULE, ClusterBase

base = typer.Typer(
    no_args_is_help=True,
    help="The long-lived base of a cluster on AWS: network, file system, roles, launch template.",
)

Cluster = Annotated[str, typer.Option(help="Name of the cluster: prefix and tag of all that is made.")]
Module = Annotated[
    Path | None, typer.Option(help="Terraform's root module; default: infra/terraform of this project.")
]


@base.command()
def apply(
    region: Annotated[str, typer.Option(help="AWS region: us-west-2.")],
    zones: Annotated[list[str], typer.Option("--zone", help="Availability zone: us-west-2a. Repeatable.")],
    cluster: Cluster = "elastic",
    file_system: Annotated[
        str, typer.Option(help="An EFS file system of yours (fs-…), never changed; default: a new one.")
    ] = "",
    module: Module = None,
) -> None:
    """Make the base, or bring it to what the module says; goes on with one that was interrupted.

    Ctrl-C lets Terraform finish, since what is in flight would be in no state; a second one cancels it.
    """
    variables: dict[str, Any] = {"cluster": cluster, "region": region, "zones": zones}
    if file_system:
        variables["file_system_id"] = file_system
    made = ClusterBase(cluster=cluster, module=module or MODULE, tell=typer.echo)
    made.apply(variables)
    typer.echo(f"base: {made.file}")
    typer.echo(f"use it: --set pool.kind=aws --set pool.cluster={cluster} --set pool.region={region}")


@base.command()
def status(cluster: Cluster = "elastic", module: Module = None) -> None:
    """Tell whether the base is as the module says; exit code 1 if `apply` would change it."""
    found = ClusterBase(cluster=cluster, module=module or MODULE, tell=typer.echo)
    has_drift = found.has_drift()
    told = "`apply` would change it" if has_drift else "as it should be"
    typer.echo(f"cluster {cluster} in {found.variables()['region']}: {told}")
    raise typer.Exit(int(has_drift))


@base.command()
def destroy(
    cluster: Cluster = "elastic",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    module: Module = None,
) -> None:
    """End the base, its own file system with all runs on it too; a file system of yours stays."""
    found = ClusterBase(cluster=cluster, module=module or MODULE, tell=typer.echo)
    variables = found.variables()
    found.check_unused()
    if not yes:
        lost = "" if "file_system_id" in variables else ", its file system and all runs on it"
        typer.confirm(f"end cluster {cluster} in {variables['region']}{lost}?", abort=True)
    found.destroy()
    typer.echo(f"cluster {cluster} is gone")
