"""Is this machine fit to train? Each check names what it looked at and, where it is bad, the remedy."""

from __future__ import annotations

import importlib.util
import ipaddress
import os
import shutil
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from enum import StrEnum
from pathlib import Path
from typing import Final

from elastic_core.agent import fitness
from elastic_core.agent.address import PORTS, address_towards, interface_of
from elastic_core.agent.preflight import ask_child, look_at_places
from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.model.job import AwsPool
from elastic_core.store.endpoint import Endpoint, parse_endpoints
from elastic_core.store.preflight import check_endpoint
from elastic_core.store.server import find_etcd
from tasks import prefect_server
from tasks.prefect_server import HOME

GIB: Final = 2**30
LEAST_DISK: Final = 1 * GIB
ENOUGH_DISK: Final = 5 * GIB
COMPUTE_S: Final = 60.0
"""For a child that has to import torch first."""
MAX_SKEW_S: Final = 5.0
_SOMEWHERE: Final = Endpoint("192.0.2.1", 9)
"""An address of nobody (RFC 5737): the route to it is the route to other machines; nothing is sent."""
_EPHEMERAL: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")


class Grade(StrEnum):
    """How a check came out."""

    GOOD = "ok"
    WARNING = "warning"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one check found.

    Attributes:
        told: What is so.
        remedy: What to do about it, "" if nothing.
    """

    name: str
    grade: Grade
    told: str
    remedy: str = ""


def examine(
    *, runs: Path, pool: str = "local", store: str = "", aws: AwsPool | None = None
) -> Iterator[Finding]:
    """Yield what each check finds, as it finds it.

    Args:
        runs: Directory of all runs' directories.
        pool: Where to train: local, docker or aws.
        store: Endpoints of an etcd to look at, "" for the run's own.
        aws: The cluster to look at, with pool aws.
    """
    yield _etcd()
    yield _disk(runs)
    yield _ports()
    yield _hostname()
    yield _route()
    yield _prefect()
    if pool == "docker":
        yield _docker()
    if pool == "aws":
        yield _terraform()
        yield from _aws(aws or AwsPool())
    for endpoint in _endpoints(store):
        answer = _answers(endpoint)
        yield answer
        if answer.grade is Grade.GOOD:
            yield _clock(endpoint)
    yield from _computing()


# ---- this machine --------------------------------------------------------------------------------


def _etcd() -> Finding:
    try:
        return _good("etcd", str(find_etcd()))
    except RefusedInput as refusal:
        return _bad("etcd", "no program", refusal.problems[0])


def _computing() -> Iterator[Finding]:
    """Look as a node does before it can be counted on."""
    if importlib.util.find_spec("torch") is None:
        yield _bad("torch", "not installed", "pip install torch")
        return
    command = [sys.executable, "-m", fitness.__name__]
    for found in ask_child(
        command, patience_s=COMPUTE_S, checks=fitness.CHECKS, remedy="reinstall torch, or see what runs here"
    ):
        grade = Grade.BAD if found.remedy else Grade.GOOD
        yield Finding(name=found.check, grade=grade, told=found.told, remedy=found.remedy)


def _disk(runs: Path) -> Finding:
    place = next(path for path in (runs.absolute(), *runs.absolute().parents) if path.exists())
    (found,) = look_at_places({"disk": str(place)})
    if found.remedy:
        return _bad("disk", found.told, f"{found.remedy} by --runs")
    free = shutil.disk_usage(place).free
    told = f"{free / GIB:.1f} GiB free for {runs}"
    remedy = "remove old runs, or name another directory by --runs"
    if free < LEAST_DISK:
        return _bad("disk", told, remedy)
    return _good("disk", told) if free >= ENOUGH_DISK else _warning("disk", told, remedy)


def _ports() -> Finding:
    told = f"rank 0 listens in {PORTS.start} to {PORTS.stop - 1}"
    try:
        low, high = map(int, _EPHEMERAL.read_text().split())
    except (OSError, ValueError):
        return _good("ports", told)
    if low < PORTS.stop and high >= PORTS.start:
        return _warning(
            "ports",
            f"{told}, and this machine's outgoing connections take {low} to {high}",
            "sysctl -w net.ipv4.ip_local_port_range='32768 60999'",
        )
    return _good("ports", told)


def _hostname() -> Finding:
    name = socket.gethostname()
    try:
        address = ipaddress.ip_address(socket.gethostbyname(name))
    except OSError as error:
        remedy = "nodes say addresses, not names; for other programs add it to /etc/hosts"
        return _warning("hostname", f"{name} does not resolve ({error.strerror or error})", remedy)
    if address.is_loopback:
        told = f"{name} resolves to {address}, which means another machine to everybody else"
        return _warning("hostname", told, "nodes say the address of their route; else give --advertise")
    return _good("hostname", f"{name} is {address}")


def _route() -> Finding:
    try:
        address = address_towards(_SOMEWHERE)
    except RefusedInput:
        return _warning("network", "no route to other machines", "only pools local and docker can train here")
    told = f"other nodes reach this one at {address} ({interface_of(address) or 'no interface known'})"
    return _good("network", told)


def _prefect() -> Finding:
    url = os.environ.get("PREFECT_API_URL", "")
    if not url:
        record = prefect_server.status(HOME)
        if record is None:
            return _good("prefect", "no server runs; `elastic-train train` starts one")
        url = record.api
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=3) as answer:  # noqa: S310 (a URL of the user's own)
            return _good("prefect", f"{url} is healthy ({answer.status})")
    except (urllib.error.URLError, OSError, ValueError) as error:
        remedy = "start it (`elastic-train server up`), or correct PREFECT_API_URL"
        return _bad("prefect", f"{url} does not answer: {error}", remedy)


# ---- pools ---------------------------------------------------------------------------------------


def _docker() -> Finding:
    from tasks.providers.docker_engine import connect

    try:
        version = connect().version()
    except ElasticError as error:
        return _bad("docker", "no engine", str(error))
    return _good("docker", f"engine {version['Version']} answers")


def _terraform() -> Finding:
    path = shutil.which("terraform")
    if path is None:
        return _bad("terraform", "no program", "install Terraform 1.11 or newer: it makes the cluster's base")
    return _good("terraform", path)


def _aws(pool: AwsPool) -> Iterable[Finding]:
    from tasks.providers.aws.account import examine_account

    for name, told, remedy in examine_account(pool):
        yield _bad(name, told, remedy) if remedy else _good(name, told)


# ---- the store -----------------------------------------------------------------------------------


def _endpoints(store: str) -> tuple[Endpoint, ...]:
    return tuple(parse_endpoints(store)) if store else ()


def _answers(endpoint: Endpoint) -> Finding:
    try:
        check_endpoint(str(endpoint))
    except RefusedInput as refusal:
        return _bad("store", f"{endpoint} cannot be used", "; ".join(refusal.problems))
    return _good("store", f"{endpoint} answers")


def _clock(endpoint: Endpoint, now: Callable[[], float] = time.time) -> Finding:
    try:
        with urllib.request.urlopen(f"http://{endpoint}/version", timeout=3) as answer:
            told = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (urllib.error.URLError, OSError, TypeError, ValueError):
        return _warning("clock", f"{endpoint} does not tell its time", "with TLS it cannot be asked here")
    skew = now() - told
    said = f"{abs(skew):.0f} s {'ahead of' if skew > 0 else 'behind'} {endpoint}"
    if abs(skew) > MAX_SKEW_S:
        return _warning("clock", said, "no decision depends on it, times in reports do: run an NTP client")
    return _good("clock", said)


# ---- words ---------------------------------------------------------------------------------------


def _good(name: str, told: str) -> Finding:
    return Finding(name=name, grade=Grade.GOOD, told=told)


def _warning(name: str, told: str, remedy: str) -> Finding:
    return Finding(name=name, grade=Grade.WARNING, told=told, remedy=remedy)


def _bad(name: str, told: str, remedy: str) -> Finding:
    return Finding(name=name, grade=Grade.BAD, told=told, remedy=remedy)
