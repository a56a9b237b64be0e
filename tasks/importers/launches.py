"""A launcher's command line as parts of a job: nodes, workers, waits, and what is trained."""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Sequence
from typing import Final

from elastic_core.errors import RefusedInput
from elastic_core.store.endpoint import parse_endpoints
from elastic_core.trainer.classy.legacy import is_classy_train, read_command
from tasks.importers.draft import Draft
from tasks.importers.launcher import Launch

_ETCD_BACKENDS: Final = ("etcd", "etcd-v2", "etcd3")
_AT_LEAST: Final = {"lease_ttl": 2.0}
GPU_VARIABLE: Final = "gpu"


def apply_launch(
    draft: Draft, launch: Launch, place: str, *, directory: str = "", gpus: Callable[[], int] = lambda: 0
) -> None:
    """Fill a draft with what a command line asks for; what the draft has already wins.

    Args:
        draft: The job in the making.
        launch: The command line.
        place: Where it stands, for messages.
        directory: Where the program's relative path starts from.
        gpus: GPUs of a node, for `--nproc-per-node=gpu`.

    Raises:
        RefusedInput: GPUs are asked for on nodes that have none.
    """
    _nodes(draft, launch, place)
    draft.set("workers_per_node", _workers(draft, launch, place, gpus))
    if launch.restarts is not None and draft.get("max_restarts") is None:
        draft.set("max_restarts", launch.restarts)
    elif launch.restarts is not None:
        draft.drop(f"{place} --max-restarts", launch.restarts, "the file says it, too, and the file wins")
    for name, seconds in launch.waits.items():
        least = _AT_LEAST.get(name, 0.0)
        if seconds < least:
            draft.say(f"{place} --rdzv-conf", f"{name} {seconds:g} becomes {least:g}, the least there is")
        draft.set(f"timeouts.{name}", max(seconds, least))
    if "etcd" not in draft.job:
        tell_rendezvous(draft, launch.backend, launch.endpoint, place)
    for flag, why in launch.ignored.items():
        draft.say(place, f"{flag} is dropped: {why}")
    if "name" not in draft.job:
        draft.name(
            launch.run or posixpath.splitext(posixpath.basename(launch.program))[0], f"{place} --rdzv-id"
        )
    _training(draft, launch, place, directory)


def tell_rendezvous(draft: Draft, backend: str, endpoint: str, place: str) -> None:
    """Keep the etcd that a rendezvous names; another backend is replaced by the run's own etcd.

    Raises:
        RefusedInput: The etcd's endpoint is none.
    """
    if backend in _ETCD_BACKENDS:
        if backend != "etcd3":
            draft.say(place, f"rendezvous {backend!r} is replaced by etcd v3")
        if endpoint:
            _keep_etcd(draft, endpoint, place)
        return
    if backend:
        draft.say(place, f"rendezvous {backend!r} is replaced by etcd v3, which the run brings along")
    if endpoint:
        draft.drop(place, endpoint, "a run brings its own etcd; etcd.endpoints names one that is there")


def _keep_etcd(draft: Draft, endpoint: str, place: str) -> None:
    try:
        members = ",".join(map(str, parse_endpoints(endpoint)))
    except RefusedInput as refusal:
        raise RefusedInput(
            [f"{draft.origin}: {place}: {problem}" for problem in refusal.problems]
        ) from refusal
    draft.set("etcd.endpoints", members)
    draft.say(
        place,
        f"the etcd at {members} is kept: flow and nodes must reach it by v3; "
        "without the key `etcd` a run brings its own",
    )


def ask_gpus(draft: Draft, count: int, place: str, *, has_gpu: bool) -> None:
    """Refuse a demand for GPUs that the pool's nodes cannot meet.

    Raises:
        RefusedInput: There is no GPU.
    """
    if count and not has_gpu:
        kind = draft.get("pool.kind", "local")
        raise RefusedInput(
            [
                f"{draft.origin}: {place}: {count} GPU{'s' if count > 1 else ''} are asked for, but nodes of "
                f"pool {kind!r} have none here: name types with GPUs, or take the demand out of the file"
            ]
        )


def _nodes(draft: Draft, launch: Launch, place: str) -> None:
    least, most = launch.nodes
    if "nodes" not in draft.job:
        draft.nodes(least=least, most=most, target=most, place=f"{place} --nnodes")
        return
    nodes = draft.job["nodes"]
    if "nnodes" in launch.said and (least, most) != (nodes["min"], nodes["max"]):
        draft.drop(
            f"{place} --nnodes",
            f"{least}:{most}",
            f"the file says {nodes['min']}:{nodes['max']}, and it wins",
        )


def _workers(draft: Draft, launch: Launch, place: str, gpus: Callable[[], int]) -> int:
    if launch.workers.isdigit():
        return int(launch.workers)
    count = gpus()
    if launch.workers == "gpu":
        ask_gpus(draft, 1, f"{place} --nproc-per-node=gpu", has_gpu=count > 0)
    number = count if launch.workers != "cpu" and count > 0 else 1
    draft.say(
        f"{place} --nproc-per-node",
        f"{launch.workers!r} becomes {number}: a job says how many workers a node has",
    )
    return number


def _training(draft: Draft, launch: Launch, place: str, directory: str) -> None:
    if launch.kind == "script" and is_classy_train(launch.program):
        _classy(draft, launch.args, place)
        return
    program = posixpath.join(directory, launch.program) if launch.kind == "script" else launch.program
    training: dict[str, object] = {"kind": "script", "script": program}
    if launch.kind != "script":
        training["entry"] = launch.kind
    if launch.args:
        training["args"] = list(launch.args)
    if launch.start_method == "spawn":
        training["start_method"] = "spawn"
    draft.job["training"] = training
    if launch.kind != "program" and (unset := [word for word in launch.args if "$" in word]):
        draft.say(place, f"argument {unset[0]!r} reaches the program as it is: no shell expands it")


def _classy(draft: Draft, args: Sequence[str], place: str) -> None:
    """Make an elastic job of a command of `classy_train.py`."""
    try:
        command = read_command(args)
    except RefusedInput as refusal:
        raise RefusedInput(
            [f"{draft.origin}: {place}: {problem}" for problem in refusal.problems]
        ) from refusal
    for note in command.notes:
        draft.say(place, note)
    training: dict[str, object] = {"kind": "classy", "config": command.config}
    draft.job["training"] = training
    if command.num_workers is not None:
        draft.set("training.num_workers", command.num_workers)  # until the config is read, see `classy`
    fit_shards(draft, place)


def fit_shards(draft: Draft, place: str) -> None:
    """Make as many virtual shards as there may be workers."""
    workers = draft.get("nodes.max", 4) * draft.get("workers_per_node", 1)
    if workers > 4:
        draft.set("training.elastic.virtual_shards", workers)
        draft.say(
            place, f"a batch is cut into {workers} virtual shards, one for each worker that there may be"
        )
