"""The registry as plain directories: nothing to install, nothing to run, readable by anything.

<models>/<job>/<number>/     model.pt, config.json, lineage.json, and what else was kept
<models>/<job>/champion      a link to one of them, replaced in one step
<models>/<job>/promotions    the numbers of all champions, in their order
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from pydantic import ValidationError

from elastic_core.ids import check_name
from tasks.registry.protocol import (
    History,
    Lineage,
    ModelVersion,
    RegistryFailed,
    known,
    numbers,
    of_run,
)

LINEAGE: Final = "lineage.json"


class DirectoryRegistry:
    """The models of one job below a directory that all their users share."""

    def __init__(self, root: Path, name: str) -> None:
        self._name = check_name("model", name)
        self._path = root / name

    def register(self, files: Path, lineage: Lineage) -> ModelVersion:
        """Copy the files aside, then give them their number in one step."""
        with self._locked():
            versions = self.versions()
            if (registered := of_run(versions, lineage.run)) is not None:
                return registered
            number = max((version.number for version in versions), default=0) + 1
            draft = self._path / ".draft"
            try:
                shutil.rmtree(draft, ignore_errors=True)
                shutil.copytree(files, draft)
                (draft / LINEAGE).write_text(lineage.model_dump_json(indent=2) + "\n")
                _sync(draft)
                draft.rename(self._path / str(number))
            except OSError as error:
                raise RegistryFailed(f"models {self._name!r}: {self._path}: {error}") from error
            return ModelVersion(number, lineage)

    def versions(self) -> Sequence[ModelVersion]:
        """Return all versions, the oldest first; a directory whose lineage cannot be read is none."""
        found = []
        for path in self._path.glob("[0-9]*"):
            try:
                lineage = Lineage.model_validate_json((path / LINEAGE).read_bytes())
            except (OSError, ValidationError):
                continue
            found.append(ModelVersion(int(path.name), lineage))
        return sorted(found, key=lambda version: version.number)

    def champion(self) -> int | None:
        """Return the number that the link names."""
        try:
            return int(self._link.readlink().name)
        except FileNotFoundError:
            return None

    def promote(self, number: int) -> None:
        """Note the promotion, then move the link."""
        known(self.versions(), number, self._name)
        with self._locked():
            self._point(self._history().promoted(number))

    def rollback(self) -> int:
        """Move the link back to the champion before."""
        with self._locked():
            history = self._history().rolled_back(self._name)
            self._point(history)
            return history[-1]

    def fetch(self, number: int) -> Path:
        """Return the version's own directory."""
        known(self.versions(), number, self._name)
        return (self._path / str(number)).absolute()

    @property
    def _link(self) -> Path:
        return self._path / "champion"

    def _history(self) -> History:
        try:
            told = numbers((self._path / "promotions").read_text())
        except FileNotFoundError:
            told = ()
        return History(told, self.champion())

    def _point(self, history: Sequence[int]) -> None:
        draft = self._path / ".promotions.draft"
        draft.write_text(",".join(map(str, history)) + "\n")
        draft.replace(self._path / "promotions")
        link = self._path / ".champion.draft"
        link.unlink(missing_ok=True)
        link.symlink_to(str(history[-1]))
        link.replace(self._link)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Be the only writer; the kernel frees the lock with its holder."""
        try:
            self._path.mkdir(parents=True, exist_ok=True)
            lock = (self._path / ".lock").open("a")
        except OSError as error:
            raise RegistryFailed(f"models {self._name!r}: {self._path}: {error.strerror}") from error
        with lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _sync(directory: Path) -> None:
    """Have the files on the disk before their directory gets its name."""
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
