"""Durable checkpoints: written whole or not at all, read only if whole, and fenced.

    <directory>/step-00000120-a1-g7/state.pt        tensors and plain values, loaded with weights_only
                                    manifest.json   size, SHA-256, step, token, digest, world history
    <directory>/fence/00001-00000007                the newest claim: who may write
    <directory>/damaged-step-…                      kept aside, never read again
    <directory>/.partial-…                          a write that is going on or was cut off

Names sort as (attempt, generation, step), so the order of checkpoints needs no file
to be read, and two writers never meet in one name.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import structlog
import torch

from elastic_core.errors import ElasticError, RefusedInput
from elastic_core.model.codec import decode

STATE: Final = "state.pt"
MANIFEST: Final = "manifest.json"

_NAME: Final = re.compile(r"^step-(\d{8,})-a(\d+)-g(\d+)$")
_CLAIM: Final = re.compile(r"^(\d{5,})-(\d{8,})$")
_CHUNK: Final = 1 << 20

log = structlog.get_logger(__name__)


class StaleGeneration(ElasticError):
    """A newer generation may write here: this writer was overtaken and must stop."""


class Token(NamedTuple):
    """The right to write: attempts count the launches of a run, generations its agreements."""

    attempt: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What is said of a checkpoint beside its state.

    Attributes:
        step: Finished optimizer steps.
        config: Digest of the configuration that decides what is learned, "" if none was given.
        worlds: World sizes so far: generation, attempt, world size and first step of each.
        size: Bytes of the state file.
        sha256: Of the state file.
    """

    step: int
    attempt: int
    generation: int
    config: str = ""
    worlds: Sequence[Sequence[int]] = ()
    size: int = 0
    sha256: str = ""
    wall_time: float = 0.0
    format: int = 1

    @property
    def name(self) -> str:
        """The checkpoint's directory."""
        return f"step-{self.step:08d}-a{self.attempt}-g{self.generation}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that was read and found whole."""

    path: Path
    manifest: Manifest
    state: Mapping[str, Any] = field(repr=False)


class _Damaged(Exception):
    """Why a checkpoint is not used."""


class CheckpointDirectory:
    """The checkpoints of one run. Safe to be shared by processes; an instance belongs to one thread."""

    def __init__(self, path: Path, *, keep: int = 3) -> None:
        self.path = path
        self._keep = keep
        self._fence = path / "fence"

    # ---- reading -----------------------------------------------------------------------------

    def require(self) -> None:
        """Check that there is something to resume.

        Raises:
            RefusedInput: The directory does not exist, or holds no checkpoint.
        """
        if not self.path.is_dir():
            raise RefusedInput(
                [
                    f"checkpoint.directory: {str(self.path)!r} does not exist; give a directory with "
                    "checkpoints, or say resume: auto to start at step 0"
                ]
            )
        if not self._names():
            raise RefusedInput(
                [
                    f"checkpoint.directory: {str(self.path)!r} holds no checkpoint; "
                    "say resume: auto to start at step 0"
                ]
            )

    def newest(self, *, above: int = -1, attempt: int = 0) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None if that has no more than `above` steps.

        Damaged ones on the way are renamed aside with one warning each.

        Args:
            above: Steps that the caller has anyway.
            attempt: Checkpoints of earlier attempts are passed over.
        """
        self._set_strangers_aside()
        for name in self._names():
            of_attempt, _, step = _order(name)
            if step <= above or of_attempt < attempt:
                return None
            try:
                return self._read(self.path / name)
            except _Damaged as damage:
                self._set_aside(name, str(damage))
        return None

    def newest_attempt(self) -> int:
        """Return the highest attempt that ever claimed this directory or wrote to it, 0 if none did."""
        written = (_order(name)[0] for name in self._names())
        return max([*written, *(claim.attempt for claim in self._claims())], default=0)

    def _names(self) -> list[str]:
        """Return all checkpoints' names, newest first."""
        names = [name for name in _listing(self.path) if _NAME.match(name)]
        return sorted(names, key=_order, reverse=True)

    def _read(self, path: Path) -> Checkpoint:
        manifest = _read_manifest(path)
        state = path / STATE
        try:
            size, sha256 = state.stat().st_size, _sha256(state)
        except OSError as error:
            raise _Damaged(f"{STATE} cannot be read: {error.strerror}") from error
        if size != manifest.size:
            raise _Damaged(f"{STATE} has {size} bytes, its manifest says {manifest.size}")
        if sha256 != manifest.sha256:
            raise _Damaged(f"the SHA-256 of {STATE} is not the one in its manifest")
        return Checkpoint(path, manifest, _load(state))

    def _set_strangers_aside(self) -> None:
        for name in _listing(self.path):
            if re.match("step[-_]", name) and not _NAME.match(name):
                self._set_aside(name, "it was not written by this product, or its name was changed")

    def _set_aside(self, name: str, why: str) -> None:
        kept, number = f"damaged-{name}", 0
        while (self.path / kept).exists():
            number += 1
            kept = f"damaged-{name}.{number}"
        with contextlib.suppress(OSError):  # read-only: it is passed over all the same
            (self.path / name).rename(self.path / kept)
        log.warning(
            "checkpoint damaged, using an older one", checkpoint=str(self.path / name), why=why, kept=kept
        )

    # ---- writing -----------------------------------------------------------------------------

    def claim(self, token: Token, owner: str) -> None:
        """Become the only writer; every lower token is refused from now on.

        Args:
            token: The own right to write.
            owner: Who claims, for the message to whom comes second.

        Raises:
            StaleGeneration: A newer token, or the same one by another owner, was claimed before.
            OSError: The directory cannot be written.
        """
        self._fence.mkdir(parents=True, exist_ok=True)
        claim = self._fence / f"{token.attempt:05d}-{token.generation:08d}"
        try:
            descriptor = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            if claim.read_text() != owner:
                raise self._stale(token, token, claim.read_text()) from None
        else:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(owner)
                stream.flush()
                os.fsync(descriptor)
            _fsync_directory(self._fence)
        self.check(token)
        self._sweep(token)

    def check(self, token: Token) -> None:
        """Check that nobody claimed a newer token.

        Raises:
            StaleGeneration: Somebody did.
        """
        newest = max(self._claims(), default=token)
        if newest > token:
            raise self._stale(token, newest, "another process")

    def write(self, state: Any, manifest: Manifest) -> Path:
        """Write a checkpoint and remove the oldest ones beyond `keep`.

        Raises:
            StaleGeneration: The manifest's token is not the newest.
            OSError: It could not be written; what was there before is untouched.
            TypeError: The state is not plain.
        """
        token = Token(manifest.attempt, manifest.generation)
        self.check(token)
        final = self.path / manifest.name
        if final.exists():
            return final  # the same token at the same step: the same state
        partial = self.path / f".partial-{manifest.name}-{os.getpid()}-{threading.get_ident()}"
        try:
            partial.mkdir()
            _write_files(partial, state, manifest)
            self.check(token)
            partial.rename(final)
            _fsync_directory(self.path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._prune()
        return final

    def _claims(self) -> list[Token]:
        matches = (_CLAIM.match(name) for name in _listing(self._fence))
        return [Token(int(match[1]), int(match[2])) for match in matches if match]

    def _stale(self, token: Token, newest: Token, owner: str) -> StaleGeneration:
        return StaleGeneration(
            f"checkpoint directory {str(self.path)!r}: attempt {token.attempt}, generation "
            f"{token.generation} may not write, for attempt {newest.attempt}, generation "
            f"{newest.generation} was claimed by {owner}; if this is a new launch on old checkpoints, "
            "count ELASTIC_ATTEMPT up"
        )

    def _sweep(self, token: Token) -> None:
        """Remove what nobody needs any more: older claims, and writes that were cut off."""
        for claim in self._claims():
            if claim < token:
                (self._fence / f"{claim.attempt:05d}-{claim.generation:08d}").unlink(missing_ok=True)
        for name in _listing(self.path):
            if name.startswith(".partial-"):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all but the newest. The one just written is good, so a good one always stays."""
        for name in self._names()[self._keep :]:
            removed = self.path / f".partial-removed-{name}"
            with contextlib.suppress(OSError):  # the next write tries again
                (self.path / name).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)


# ---- files -----------------------------------------------------------------------------------


class _HashingFile:
    """A file to write that knows the digest of what was written."""

    def __init__(self, path: Path) -> None:
        self._stream = path.open("wb")
        self.digest = hashlib.sha256()
        self.size = 0

    def write(self, data: Any) -> int:
        self.digest.update(data)
        self.size += memoryview(data).nbytes
        return self._stream.write(data)

    def flush(self) -> None:
        self._stream.flush()

    def close(self) -> None:
        try:
            self._stream.flush()
            os.fsync(self._stream.fileno())
        finally:
            with contextlib.suppress(OSError):  # the same again
                self._stream.close()


def _write_files(directory: Path, state: Any, manifest: Manifest) -> None:
    stream = _HashingFile(directory / STATE)
    try:
        torch.save(state, stream)  # type: ignore[arg-type]  # it needs write and flush only
    except RuntimeError as error:  # what a failed write comes to on its way through torch
        raise OSError(errno.EIO, f"{STATE} could not be written: {_first_line(error)}") from error
    finally:
        stream.close()
    try:
        _load(directory / STATE, mmap=True)
    except _Damaged as damage:  # what cannot be read back must not become a checkpoint
        raise OSError(errno.EIO, f"{damage}, right after it was written") from damage
    whole = {**asdict(manifest), "size": stream.size, "sha256": stream.digest.hexdigest()}
    with (directory / MANIFEST).open("w") as file:
        json.dump(whole, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_directory(directory)


def _load(path: Path, *, mmap: bool = False) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _Damaged(f"refused: {path.name} is not a plain checkpoint ({_first_line(error)})") from error
    except Exception as error:  # nonsense makes torch's unpickler fail anyhow: IndexError, AssertionError, …
        raise _Damaged(f"{path.name} cannot be read: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise _Damaged(f"{path.name} holds a {type(state).__name__}, not a state")
    return state


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = decode(Manifest, (path / MANIFEST).read_bytes())
    except OSError as error:
        raise _Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise _Damaged(f"{MANIFEST} is {_first_line(error)}") from error
    if manifest.name != path.name:
        raise _Damaged(f"{MANIFEST} belongs to {manifest.name}")
    return manifest


def _order(name: str) -> tuple[int, int, int]:
    """Return attempt, generation and step of a checkpoint's name."""
    step, attempt, generation = map(int, re.findall(r"\d+", name))
    return attempt, generation, step


def _listing(directory: Path) -> list[str]:
    with contextlib.suppress(FileNotFoundError):
        return sorted(os.listdir(directory))  # noqa: PTH208 (names are all that is needed)
    return []


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _fsync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
