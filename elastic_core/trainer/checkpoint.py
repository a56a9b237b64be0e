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
from abc import ABC, abstractmethod
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
FENCE: Final = "fence"

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

    path: str
    manifest: Manifest
    state: Mapping[str, Any] = field(repr=False)


class Damaged(Exception):
    """Why a checkpoint is not used."""


class Checkpoints(ABC):
    """The checkpoints of one run, wherever they lie. Safe to be shared by processes; one thread an instance.

    Attributes:
        location: The directory or URL, for people.
    """

    location: str

    def require(self) -> None:
        """Check that there is something to resume.

        Raises:
            RefusedInput: The place does not exist, or holds no checkpoint.
        """
        if not self._exists():
            raise RefusedInput(
                [
                    f"checkpoint.directory: {self.location!r} does not exist; give a directory with "
                    "checkpoints, or say resume: auto to start at step 0"
                ]
            )
        if not self._names():
            raise RefusedInput(
                [
                    f"checkpoint.directory: {self.location!r} holds no checkpoint; "
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
                return self._read(name)
            except Damaged as damage:
                self._set_aside(name, str(damage))
        return None

    def newest_attempt(self) -> int:
        """Return the highest attempt that ever claimed this place or wrote to it, 0 if none did."""
        written = (_order(name)[0] for name in self._names())
        return max([*written, *(claim.attempt for claim in self._claims())], default=0)

    def claim(self, token: Token, owner: str) -> None:
        """Become the only writer; every lower token is refused from now on.

        Args:
            token: The own right to write.
            owner: Who claims, for the message to whom comes second.

        Raises:
            StaleGeneration: A newer token, or the same one by another owner, was claimed before.
            OSError: The place cannot be written.
        """
        holder = self._place_claim(claim_name(token), owner)
        if holder != owner:
            raise self._stale(token, token, holder)
        self.check(token)
        for claim in self._claims():
            if claim < token:
                self._remove_claim(claim_name(claim))
        self._sweep()

    def check(self, token: Token) -> None:
        """Check that nobody claimed a newer token.

        Raises:
            StaleGeneration: Somebody did.
        """
        newest = max(self._claims(), default=token)
        if newest > token:
            raise self._stale(token, newest, "another process")

    def sees(self, token: Token) -> bool:
        """Tell whether the claim of a token, which was placed elsewhere, or a newer one is seen from here.

        Asked by its name: a listing may be older than the claim on a network file system.
        """
        return self._has_claim(claim_name(token)) or any(claim >= token for claim in self._claims())

    @abstractmethod
    def write(self, state: Any, manifest: Manifest) -> str:
        """Write a checkpoint, remove the oldest ones beyond those to keep, and return where it lies.

        Raises:
            StaleGeneration: The manifest's token is not the newest.
            OSError: It could not be written; what was there before is untouched.
            TypeError: The state is not plain.
        """

    @abstractmethod
    def _exists(self) -> bool: ...

    @abstractmethod
    def _list(self, folder: str = "") -> list[str]:
        """Return the names in the place, or in a folder of it."""

    @abstractmethod
    def _read(self, name: str) -> Checkpoint:
        """Read a checkpoint whole; raises `Damaged`."""

    @abstractmethod
    def _rename(self, name: str, to: str) -> None: ...

    @abstractmethod
    def _place_claim(self, name: str, owner: str) -> str:
        """Write a claim if there is none, and return whose it is."""

    @abstractmethod
    def _has_claim(self, name: str) -> bool: ...

    @abstractmethod
    def _remove_claim(self, name: str) -> None: ...

    @abstractmethod
    def _sweep(self) -> None:
        """Remove writes that were cut off."""

    def _names(self) -> list[str]:
        """Return all checkpoints' names, newest first."""
        return sorted((name for name in self._list() if _NAME.match(name)), key=_order, reverse=True)

    def _claims(self) -> list[Token]:
        matches = (_CLAIM.match(name) for name in self._list(FENCE))
        return [Token(int(match[1]), int(match[2])) for match in matches if match]

    def _stale(self, token: Token, newest: Token, owner: str) -> StaleGeneration:
        return StaleGeneration(
            f"checkpoint directory {self.location!r}: attempt {token.attempt}, generation "
            f"{token.generation} may not write, for attempt {newest.attempt}, generation "
            f"{newest.generation} was claimed by {owner}; if this is a new launch on old checkpoints, "
            "count ELASTIC_ATTEMPT up"
        )

    def _set_strangers_aside(self) -> None:
        for name in self._list():
            if re.match("step[-_]", name) and not _NAME.match(name):
                self._set_aside(name, "it was not written by this product, or its name was changed")

    def _set_aside(self, name: str, why: str) -> None:
        taken = set(self._list())
        kept, number = f"damaged-{name}", 0
        while kept in taken:
            number += 1
            kept = f"damaged-{name}.{number}"
        with contextlib.suppress(OSError):  # read-only: it is passed over all the same
            self._rename(name, kept)
        log.warning(
            "checkpoint damaged, using an older one",
            checkpoint=f"{self.location}/{name}",
            why=why,
            kept=kept,
        )


class CheckpointDirectory(Checkpoints):
    """Checkpoints in a directory that all nodes see: renamed into place, so that each is there whole."""

    def __init__(self, path: Path, *, keep: int = 3) -> None:
        self.path = path
        self.location = str(path)
        self._keep = keep
        self._fence = path / FENCE

    def write(self, state: Any, manifest: Manifest) -> str:
        """Write a checkpoint and remove the oldest ones beyond `keep`; see `Checkpoints.write`."""
        token = Token(manifest.attempt, manifest.generation)
        self.check(token)
        final = self.path / manifest.name
        if final.exists():
            return str(final)  # the same token at the same step: the same state
        partial = self.path / f".partial-{manifest.name}-{os.getpid()}-{threading.get_ident()}"
        try:
            partial.mkdir()
            write_files(partial, state, manifest)
            self.check(token)
            partial.rename(final)
            _fsync_directory(self.path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        self._prune()
        return str(final)

    def _exists(self) -> bool:
        return self.path.is_dir()

    def _list(self, folder: str = "") -> list[str]:
        with contextlib.suppress(FileNotFoundError):
            return sorted(os.listdir(self.path / folder))  # noqa: PTH208 (names are all that is needed)
        return []

    def _read(self, name: str) -> Checkpoint:
        return read_files(self.path / name)

    def _rename(self, name: str, to: str) -> None:
        (self.path / name).rename(self.path / to)

    def _place_claim(self, name: str, owner: str) -> str:
        self._fence.mkdir(parents=True, exist_ok=True)
        claim = self._fence / name
        try:
            descriptor = os.open(claim, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        except FileExistsError:
            return claim.read_text()
        with os.fdopen(descriptor, "w") as stream:
            stream.write(owner)
            stream.flush()
            os.fsync(descriptor)
        _fsync_directory(self._fence)
        return owner

    def _has_claim(self, name: str) -> bool:
        return (self._fence / name).exists()

    def _remove_claim(self, name: str) -> None:
        (self._fence / name).unlink(missing_ok=True)

    def _sweep(self) -> None:
        for name in self._list():
            if name.startswith(".partial-"):
                shutil.rmtree(self.path / name, ignore_errors=True)

    def _prune(self) -> None:
        """Remove all but the newest. The one just written is good, so a good one always stays."""
        for name in self._names()[self._keep :]:
            removed = self.path / f".partial-removed-{name}"
            with contextlib.suppress(OSError):  # the next write tries again
                (self.path / name).rename(removed)
                shutil.rmtree(removed, ignore_errors=True)


def claim_name(token: Token) -> str:
    """Return the name of a claim's file."""
    return f"{token.attempt:05d}-{token.generation:08d}"


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


def write_files(directory: Path, state: Any, manifest: Manifest) -> None:
    """Write state and manifest into an empty directory, and check that the state can be loaded again."""
    stream = _HashingFile(directory / STATE)
    try:
        torch.save(state, stream)  # type: ignore[arg-type]  # it needs write and flush only
    except RuntimeError as error:  # what a failed write comes to on its way through torch
        raise OSError(errno.EIO, f"{STATE} could not be written: {_first_line(error)}") from error
    finally:
        stream.close()
    try:
        _load(directory / STATE, mmap=True)
    except Damaged as damage:  # what cannot be read back must not become a checkpoint
        raise OSError(errno.EIO, f"{damage}, right after it was written") from damage
    whole = {**asdict(manifest), "size": stream.size, "sha256": stream.digest.hexdigest()}
    with (directory / MANIFEST).open("w") as file:
        json.dump(whole, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _fsync_directory(directory)


def read_files(path: Path) -> Checkpoint:
    """Read a checkpoint whole.

    Raises:
        Damaged: It is not.
    """
    manifest = _read_manifest(path)
    state = path / STATE
    try:
        size, sha256 = state.stat().st_size, _sha256(state)
    except OSError as error:
        raise Damaged(f"{STATE} cannot be read: {error.strerror}") from error
    if size != manifest.size:
        raise Damaged(f"{STATE} has {size} bytes, its manifest says {manifest.size}")
    if sha256 != manifest.sha256:
        raise Damaged(f"the SHA-256 of {STATE} is not the one in its manifest")
    return Checkpoint(str(path), manifest, _load(state))


def _load(path: Path, *, mmap: bool = False) -> Mapping[str, Any]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise Damaged(f"refused: {path.name} is not a plain checkpoint ({_first_line(error)})") from error
    except Exception as error:  # nonsense makes torch's unpickler fail anyhow: IndexError, AssertionError, …
        raise Damaged(f"{path.name} cannot be read: {type(error).__name__}: {_first_line(error)}") from error
    if not isinstance(state, dict):
        raise Damaged(f"{path.name} holds a {type(state).__name__}, not a state")
    return state


def _read_manifest(path: Path) -> Manifest:
    try:
        manifest = decode(Manifest, (path / MANIFEST).read_bytes())
    except OSError as error:
        raise Damaged(f"{MANIFEST} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise Damaged(f"{MANIFEST} is {_first_line(error)}") from error
    if manifest.name != path.name:
        raise Damaged(f"{MANIFEST} belongs to {manifest.name}")
    return manifest


def _order(name: str) -> tuple[int, int, int]:
    """Return attempt, generation and step of a checkpoint's name."""
    step, attempt, generation = map(int, re.findall(r"\d+", name))
    return attempt, generation, step


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
