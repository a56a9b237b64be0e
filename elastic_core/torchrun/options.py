r"""What torchrun's command line says, as settings: the entry point of the plug-in.

    torchrun --rdzv-backend=etcd3 --rdzv-endpoint=HOST[:2379][,HOST2…] --rdzv-id=NAME \
        --nnodes=MIN:MAX --rdzv-conf=ttl=5,last_call_timeout=10 train.py

Keys of --rdzv-conf (times in seconds):

    ttl                 TTL of a node's lease: a dead node is noticed after it (default 5)
    last_call_timeout   how long the first round stays open once MIN nodes wait (default 5)
    join_timeout        how long a round may take to be formed (default 600)
    closed_ttl          how long a finished run's name stays taken (default 86400)
    ca                  PEM file of the store's certificate authority: turns TLS on
    cert, key           PEM files of this client's certificate

User and password come from the environment: ELASTIC_STORE_USER, ELASTIC_STORE_PASSWORD.
"""

from __future__ import annotations

import hashlib
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import structlog
from torch.distributed.elastic.rendezvous.api import (
    RendezvousConnectionError,
    RendezvousHandlerCreator,
    RendezvousParameters,
)

from elastic_core.agent.address import address_towards
from elastic_core.errors import RefusedInput
from elastic_core.ids import RunId
from elastic_core.model.job_file import nearest
from elastic_core.rendezvous.rounds import RoundPolicy
from elastic_core.store.endpoint import (
    PASSWORD_VARIABLE,
    USER_VARIABLE,
    Credentials,
    TlsFiles,
    parse_endpoints,
)
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.keys import RunKeys
from elastic_core.store.preflight import check_endpoint
from elastic_core.torchrun.handler import Etcd3RendezvousHandler, HandlerSettings

_TIMES: Final[Mapping[str, float]] = {
    "ttl": 5.0,
    "last_call_timeout": 5.0,
    "join_timeout": 600.0,
    "closed_ttl": 86_400.0,
}
_FILES: Final = ("ca", "cert", "key")
_IGNORED: Final = frozenset({"timeout", "rank", "is_host", "store_type", "read_timeout"})
"""Keys that torchrun sets by itself or that its own back ends know."""

_NAME: Final = re.compile(r"[a-z][a-z0-9-]{0,40}[a-z0-9]")


def creator() -> RendezvousHandlerCreator:
    """Return what torch registers as the back end `etcd3`."""
    return create_handler


def create_handler(parameters: RendezvousParameters) -> Etcd3RendezvousHandler:
    """Return the handler for torchrun's options.

    Raises:
        ValueError: An option is wrong; one line each.
        RendezvousConnectionError: The store cannot be reached; the line says why.
    """
    if not structlog.is_configured():
        _log_through_logging()
    try:
        times = _times(parameters.config)
        if not parameters.endpoint:
            raise RefusedInput(["--rdzv-endpoint is empty: give the address of etcd, host:port"])
        endpoints = parse_endpoints(parameters.endpoint)
        tls = _tls(parameters.config)
        address = parameters.local_addr or address_towards(*endpoints)
    except RefusedInput as error:
        raise ValueError(str(error)) from error
    try:
        check_endpoint(parameters.endpoint, tls=tls)
    except RefusedInput as error:
        raise RendezvousConnectionError(str(error)) from error
    user = os.environ.get(USER_VARIABLE)
    credentials = Credentials(user, os.environ.get(PASSWORD_VARIABLE, "")) if user else None
    settings = HandlerSettings(
        run_id=parameters.run_id,
        instance=_instance(),
        address=address,
        policy=RoundPolicy(
            min_nodes=parameters.min_nodes,
            max_nodes=parameters.max_nodes,
            last_call=times["last_call_timeout"],
        ),
        ttl_s=times["ttl"],
        join_timeout_s=times["join_timeout"],
        closed_ttl_s=times["closed_ttl"],
    )
    store = EtcdStore(parameters.endpoint, tls=tls, credentials=credentials)
    return Etcd3RendezvousHandler(store, RunKeys(run_name(parameters.run_id)), settings)


def run_name(run_id: str) -> RunId:
    """Return the run under which the store keeps torch's run id, which may be any text.

    Its own prefix keeps it apart from the runs of `elastic-agent`.
    """
    if not _NAME.fullmatch(run_id):
        run_id = hashlib.sha256(run_id.encode()).hexdigest()[:16]
    return RunId(f"torchrun-{run_id}")


def _log_through_logging() -> None:
    """Log as torchrun does: we are a guest in its process, and standard output is the script's."""
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            structlog.processors.KeyValueRenderer(key_order=["event"]),
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )


def _instance() -> str:
    """Return a valid node name for this process."""
    host = re.sub(r"[^a-z0-9]+", "-", socket.gethostname().lower()).strip("-")
    return f"node-{host[:40].rstrip('-')}-{os.getpid()}" if host else f"node-{os.getpid()}"


def _times(config: Mapping[str, str]) -> dict[str, float]:
    known = [*_TIMES, *_FILES]
    problems = [
        f"--rdzv-conf: unknown key {key!r}{nearest(key, known)}; known: {', '.join(known)}"
        for key in config
        if key not in known and key not in _IGNORED
    ]
    times = dict(_TIMES)
    for key in _TIMES.keys() & config.keys():
        try:
            times[key] = float(config[key])
        except ValueError:
            times[key] = 0.0
        if not 0 < times[key] < 1e9:
            problems.append(f"--rdzv-conf: {key}={config[key]} is not a number of seconds above 0")
    if problems:
        raise RefusedInput(problems)
    return times


def _tls(config: Mapping[str, str]) -> TlsFiles | None:
    files = {key: Path(config[key]) for key in _FILES if key in config}
    if not files:
        return None
    if "ca" not in files:
        raise RefusedInput(["--rdzv-conf: cert and key need ca: give the store's CA file"])
    return TlsFiles(**files)
