"""What can be wrong with a Docker pool, found before anything is made."""

from __future__ import annotations

from pathlib import Path

from elastic_core.errors import ProviderUnavailable, RefusedInput
from elastic_core.model.job import CheckpointPolicy, DockerPool
from tasks.providers.docker_engine import check_image, connect, named


def check_pool(pool: DockerPool, checkpoint: CheckpointPolicy) -> None:
    """Refuse a pool on which no node could start, or could not keep its checkpoints.

    Raises:
        RefusedInput: All mistakes, one line each.
    """
    problems = [*_mount_problems(pool), *_checkpoint_problems(pool, checkpoint)]
    try:
        client = connect()
        with named():
            check_image(client, pool.image)
    except RefusedInput as refusal:
        problems += refusal.problems
    except ProviderUnavailable as error:
        problems.append(f"pool.kind: is 'docker', but {error}")
    if problems:
        raise RefusedInput(problems)


def _mount_problems(pool: DockerPool) -> list[str]:
    return [
        f"pool.mounts.{number}.source: {mount.source!r} is not a directory of this machine; "
        "give one that exists"
        for number, mount in enumerate(pool.mounts)
        if not Path(mount.source).is_dir()
    ]


def _checkpoint_problems(pool: DockerPool, checkpoint: CheckpointPolicy) -> list[str]:
    directory = Path(checkpoint.directory)
    writable = [mount.target for mount in pool.mounts if not mount.read_only]
    if not checkpoint.directory or any(directory.is_relative_to(target) for target in writable):
        return []
    return [
        f"checkpoint.directory: {checkpoint.directory!r} is not mounted in the containers, so it would be "
        "lost with them; leave it empty, or add it to pool.mounts with read_only: false"
    ]
