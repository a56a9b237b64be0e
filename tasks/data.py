"""The fingerprint of a job's data: the content of all files, read again only where it may have changed."""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from elastic_core.model.job import ClassyTraining, JobSpec
from elastic_core.quality.data import DataPrint

_FETCHING: Final = frozenset({"num_workers", "batchsize_per_replica", "use_shuffle", "transforms"})
"""Keys of a data set's section that say how data are fetched, not which."""
_CHUNK: Final = 1 << 20


def fingerprint(job: JobSpec, cache: Path) -> DataPrint:
    """Return the fingerprint of the data that a resolved Classy Vision job trains on.

    A file's content is read once: as long as its size, its times and its inode stay the same, the
    digest of before holds. Names that start with a dot are no data.

    Args:
        job: A job whose config is read in.
        cache: Directory for the digests of files.
    """
    assert isinstance(job.training, ClassyTraining)
    assert isinstance(job.training.config, dict)
    sections = job.training.config["dataset"]
    described = {
        phase: {key: value for key, value in section.items() if key not in _FETCHING | _roots(section).keys()}
        for phase, section in sections.items()
        if section is not None
    }
    digest = hashlib.blake2b(json.dumps(described, sort_keys=True).encode(), digest_size=16)
    roots = sorted({root for section in sections.values() if section for root in _roots(section).values()})
    folders: Counter[str] = Counter()
    size = 0
    for root in roots:
        for name, content, length in _contents(Path(root), cache):
            digest.update(f"{name}\0{content}\n".encode())
            folders[Path(name).parent.as_posix()] += 1
            size += length
    return DataPrint(digest=digest.hexdigest(), files=folders.total(), size=size, folders=dict(folders))


def _roots(section: Mapping[str, Any]) -> dict[str, str]:
    """Return the keys of a section that name something on this machine's disk, with the path."""
    paths = {key: value for key, value in section.items() if isinstance(value, str) and "/" in value}
    return {key: value for key, value in paths.items() if Path(value).exists()}


def _contents(root: Path, cache: Path) -> Iterator[tuple[str, str, int]]:
    """Yield name, digest of the content and size of each file below a root, in the order of their names."""
    kept = cache / f"{hashlib.blake2b(str(root.absolute()).encode(), digest_size=8).hexdigest()}.json"
    try:
        known = json.loads(kept.read_bytes())
    except (OSError, ValueError):
        known = {}
    fresh: dict[str, tuple[str, str]] = {}
    for path in sorted(_files(root)):
        stat = path.stat()
        name = path.relative_to(root).as_posix() if path != root else path.name
        stamp = f"{stat.st_size}-{stat.st_mtime_ns}-{stat.st_ctime_ns}-{stat.st_ino}"
        content = known[name][1] if known.get(name, [""])[0] == stamp else _digest(path)
        fresh[name] = (stamp, content)
        yield name, content, stat.st_size
    if fresh != known:
        cache.mkdir(parents=True, exist_ok=True)
        draft = kept.with_name(f".{kept.name}.{os.getpid()}")
        draft.write_text(json.dumps(fresh))
        draft.replace(kept)


def _files(root: Path) -> Iterator[Path]:
    if root.is_file():
        yield root
    for folder, folders, files in os.walk(root, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield from (Path(folder, name) for name in files if not name.startswith("."))


def _digest(path: Path) -> str:
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
