"""The agent's private directory: sockets and small files, gone with the agent, or swept by the next one.

An agent that is killed cannot tidy up. It holds a lock on its directory as long as
it lives, which the kernel drops with it, in whichever container it was.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

from elastic_core.agent.channel import MAX_PATH

PREFIX: Final = "elastic-agent-"
_LOCK: Final = "lock"
_LONGEST: Final = MAX_PATH - len(f"/{PREFIX}12345678/agent.sock")
"""Bytes of the path of a directory in which a socket has room."""


class PrivateDirectory:
    """A directory below the temporary one that only this user enters."""

    def __init__(self) -> None:
        """Make it, and remove those that dead agents of this user left."""
        parent = _parent()
        _sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
        draft = self.path / f"{_LOCK}.draft"
        self._lock = os.open(draft, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self.path / _LOCK)  # nobody sees it without the lock on it

    def remove(self) -> None:
        """Remove it with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)


def _parent() -> Path:
    """Return the temporary directory, or /tmp where its path leaves no room for a socket's."""
    parent = Path(tempfile.gettempdir())
    return parent if len(os.fsencode(parent)) <= _LONGEST else Path("/tmp")  # noqa: S108 (a private one below)


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or just being removed
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
