"""Everything that an agent is told when it starts, checked."""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from elastic_core.agent.notices import NoticeSource
from elastic_core.agent.process import Entrypoint
from elastic_core.ids import RunId
from elastic_core.model.sizes import ALL_SIZES, AllowedSizes
from elastic_core.store.endpoint import Credentials, TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Waits:
    """Waits in seconds, from `--rdzv-conf`.

    Attributes:
        hang: A worker that makes no step for so long hangs; 0: derived from its steps so far.
    """

    lease_ttl: float = 3.0
    last_call: float = 5.0
    join: float = 600.0
    probe: float = 0.3
    suspect: float = 0.7
    stop_grace: float = 30.0
    stop: float = 60.0
    flow: float = 0.0
    """The run stops when no flow drove it for so long; 0: it needs none."""
    hang: float = 0.0
    partial_exit: float = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentSettings:
    """One agent's part in one run.

    Attributes:
        endpoint: The store's `host:port[,host:port…]`; "" with `standalone`.
        tls: How to speak TLS with the store, None for plaintext.
        credentials: Who this agent is for the store, None if it asks for no user.
        name: This instance's name; its node ids begin with it.
        advertise: Address for the other nodes, "" to take the one that the store is reached from.
        notice_source: Where it is announced that this machine goes, None to look nowhere.
        preflight: Look whether this node is fit before it takes part.
        notices: What should be told to people although it is no mistake.
    """

    min_nodes: int
    max_nodes: int
    slots: int
    run: RunId
    name: str
    entrypoint: Entrypoint
    args: tuple[str, ...] = ()
    api: Literal["torchrun", "elastic"] = "torchrun"
    endpoint: str = ""
    tls: TlsFiles | None = None
    credentials: Credentials | None = None
    standalone: bool = False
    sizes: AllowedSizes = ALL_SIZES
    waits: Waits = Waits()
    max_restarts: int = 0
    changes_per_hour: int = 0
    no_progress_limit: int = 3
    start_method: Literal["fork", "spawn"] = "fork"
    preload: tuple[str, ...] = ()
    preflight: bool = True
    role: str = "default"
    log_dir: Path | None = None
    run_dir: str = ""
    job: str = ""
    attempt: int = 1
    advertise: str = ""
    notice_source: NoticeSource | None = None
    notices: tuple[str, ...] = field(default=())


def places_of(settings: AgentSettings) -> dict[str, str]:
    """Return the directories that this node writes to, by the name of their check; URLs are none."""
    places = {"temporary files": tempfile.gettempdir()}
    if settings.run_dir:
        places["disk"] = settings.run_dir
        places["checkpoints"] = f"{settings.run_dir}/checkpoints"
    if settings.job:
        declared = json.loads(Path(settings.job).read_bytes()).get("checkpoint", {}).get("directory", "")
        if declared:
            places["checkpoints"] = declared
    return {name: place for name, place in places.items() if "://" not in place}
