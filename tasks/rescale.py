"""Set the size of a running job, through its store: it works with the flow dead, for agents act on the store.

The flow that drives the run sees the new target there too, and launches or ends nodes for it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

from elastic_core.errors import RefusedInput, StoreUnavailable
from elastic_core.ids import NO_REVISION
from elastic_core.model.codec import decode, encode
from elastic_core.model.membership import Generation, Target
from elastic_core.rescale.decision import Rescale, decide, describe
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Condition, Created, KeyWritten, Modified, Put, Store, WatchRestarted
from tasks.agents import etcd_of
from tasks.etcd import connected
from tasks.runs import RunDirectory, find_run


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescaled:
    """What became of a wish.

    Attributes:
        generation: The newest generation with so many nodes, None if none was formed in time.
    """

    run: str
    before: Target | None
    target: Target
    generation: Generation | None = None

    def headline(self) -> str:
        """Say it in one sentence."""
        said = f"run {self.run}: {describe(self.before, self.target)}"
        if self.generation is None:
            return said
        number, nodes = self.generation.number, self.generation.group_world_size
        return f"{said}; generation {number} trains on {nodes} nodes"


def rescale(root: Path, run: str, wish: Rescale, *, wait_s: float = 0) -> Rescaled:
    """Set the size of a running job; wait so long for the generation that has it.

    Raises:
        NoSuchRun: There is no such run.
        RefusedInput: It does not run, or the wish is outside the job's limits; nothing was changed.
    """
    directory = find_run(root, run)
    etcd = etcd_of(directory.job(), directory)
    record = etcd.record()
    if record is None or not etcd.is_running():
        raise RefusedInput([f"run {directory.run} does not run: start it with nodes.target in the job"])
    with connected(record.endpoint, directory.job().etcd) as store:
        before, target = set_target(store, directory, wish)
        generation = await_generation(store, RunKeys(directory.run), target.nodes, wait_s) if wait_s else None
    return Rescaled(run=directory.run, before=before, target=target, generation=generation)


def set_target(store: Store, directory: RunDirectory, wish: Rescale) -> tuple[Target | None, Target]:
    """Write the target that a wish leads to; return the one before, too.

    Raises:
        RefusedInput: The run is over or ends, or the wish is outside the job's limits.
    """
    keys = RunKeys(directory.run)
    while True:
        entry = store.read(keys.target)
        if store.read(keys.closed) is not None or store.read(keys.stop) is not None:
            raise RefusedInput([f"run {directory.run} is over or ends: start it again to train on"])
        before = decode(Target, entry.value) if entry else None
        target = decide(wish, directory.job().nodes, before)
        unchanged = Modified(keys.target, entry.modified if entry else NO_REVISION)
        going_on = [Created(key, NO_REVISION) for key in (keys.closed, keys.stop)]
        conditions: list[Condition] = [unchanged, *going_on]
        if store.transact(conditions, [Put(keys.target, encode(target))]).succeeded:
            return before, target


def await_generation(store: Store, keys: RunKeys, nodes: int, timeout_s: float) -> Generation | None:
    """Return the generation in force as soon as it has so many nodes, None if that takes too long."""
    watch = store.watch([keys.current])
    patience = threading.Timer(timeout_s, watch.close)
    patience.start()
    try:
        for event in watch:
            match event:
                case KeyWritten(entry=entry):
                    found = decode(Generation, entry.value)
                case WatchRestarted(snapshot=snapshot) if snapshot.entries:
                    found = decode(Generation, snapshot.entries[0].value)
                case _:
                    continue
            if found.group_world_size == nodes:
                return found
    except StoreUnavailable:
        return None
    finally:
        patience.cancel()
        watch.close()
    return None
