"""Checkpoints behind a URL: any file system that fsspec knows (s3, gs, abfs, memory…).

An object store renames nothing, so a checkpoint is there when its manifest is, which is
written last and removed first. A directory without one is a write that is going on
or was cut off: readers pass it over, and the next claim removes it.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any, Final

import fsspec

from elastic_core.errors import RefusedInput
from elastic_core.trainer.checkpoint import (
    FENCE,
    MANIFEST,
    STATE,
    Checkpoint,
    CheckpointDirectory,
    Checkpoints,
    Damaged,
    Manifest,
    Token,
    read_files,
    write_files,
)

_SCHEME: Final = "://"


def open_checkpoints(location: str | Path, *, keep: int = 3) -> Checkpoints:
    """Return the checkpoints of a directory or a URL.

    Raises:
        RefusedInput: No installed file system knows the URL's scheme.
    """
    text = str(location)
    if _SCHEME not in text:
        return CheckpointDirectory(Path(text), keep=keep)
    return CheckpointUrl(text, keep=keep)


class CheckpointUrl(Checkpoints):
    """The checkpoints under a URL."""

    def __init__(self, url: str, *, keep: int = 3) -> None:
        """Open the file system.

        Raises:
            RefusedInput: It is not known, or its package is not installed.
        """
        self.location = url.rstrip("/")
        self._keep = keep
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.location, use_listings_cache=False)
        except (ValueError, ImportError) as error:
            raise RefusedInput([f"checkpoint.directory: {url!r} cannot be opened: {error}"]) from error

    def write(self, state: Any, manifest: Manifest) -> str:
        """Write a checkpoint and remove the oldest ones beyond `keep`; see `Checkpoints.write`."""
        token = Token(manifest.attempt, manifest.generation)
        self.check(token)
        where = f"{self.location}/{manifest.name}"
        if manifest.name in self._names():
            return where
        with tempfile.TemporaryDirectory(prefix="elastic-checkpoint-") as draft:
            write_files(Path(draft), state, manifest)
            self._files.makedirs(self._at(manifest.name), exist_ok=True)
            self._files.put_file(f"{draft}/{STATE}", self._at(manifest.name, STATE))
            self.check(token)
            self._files.put_file(f"{draft}/{MANIFEST}", self._at(manifest.name, MANIFEST))
        for name in self._names()[self._keep :]:
            with contextlib.suppress(OSError):  # the next write tries again
                self._remove(name)
        return where

    def _exists(self) -> bool:
        return bool(self._files.exists(self._root))

    def _list(self, folder: str = "") -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            found = self._files.ls(self._at(folder) if folder else self._root, detail=False)
            return sorted({path.rstrip("/").rpartition("/")[2] for path in found})
        return []

    def _names(self) -> list[str]:
        return [name for name in super()._names() if self._files.exists(self._at(name, MANIFEST))]

    def _read(self, name: str) -> Checkpoint:
        with tempfile.TemporaryDirectory(prefix="elastic-checkpoint-") as copy:
            local = Path(copy) / name
            local.mkdir()
            for file in (MANIFEST, STATE):
                try:
                    self._files.get_file(self._at(name, file), str(local / file))
                except FileNotFoundError as error:
                    raise Damaged(f"{file} is not there") from error
            whole = read_files(local)
        return Checkpoint(f"{self.location}/{name}", whole.manifest, whole.state)

    def _rename(self, name: str, to: str) -> None:
        self._files.mv(self._at(name), self._at(to), recursive=True)

    def _place_claim(self, name: str, owner: str) -> str:
        claim = self._at(FENCE, name)
        self._files.makedirs(self._at(FENCE), exist_ok=True)
        try:
            self._files.pipe_file(claim, owner.encode(), mode="create")
        except FileExistsError:
            return str(self._files.cat_file(claim).decode())
        return owner

    def _has_claim(self, name: str) -> bool:
        return bool(self._files.exists(self._at(FENCE, name)))

    def _remove_claim(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(FENCE, name))

    def _sweep(self) -> None:
        whole = set(self._names())
        for name in super()._names():
            if name not in whole:
                self._remove(name)

    def _remove(self, name: str) -> None:
        for file in (MANIFEST, STATE):
            with contextlib.suppress(FileNotFoundError):
                self._files.rm_file(self._at(name, file))
        with contextlib.suppress(OSError, NotImplementedError):
            self._files.rmdir(self._at(name))

    def _at(self, *parts: str) -> str:
        return "/".join((self._root.rstrip("/"), *parts))
