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

PREFIX: Final = "elastic-agent-"
_LOCK: Final = "lock"


class PrivateDirectory:
    """A directory below the temporary one that only this user enters."""

    def __init__(self) -> None:
        """Make it, and remove those that dead agents of this user left."""
        parent = Path(tempfile.gettempdir())
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


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{PREFIX}*/{_LOCK}"):
        with contextlib.suppress(OSError):  # another user's, or just being removed
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path.parent, ignore_errors=True)
            finally:
                os.close(descriptor)
