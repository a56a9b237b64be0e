"""Checkpoints written behind the training: it stands still for a copy in memory only."""

from __future__ import annotations

import errno
import threading
from typing import Any, Final

import structlog

from elastic_core.clock import Clock
from elastic_core.errors import RefusedInput
from elastic_core.trainer.checkpoint import Checkpoints, Manifest, StaleGeneration, Token
from elastic_core.trainer.snapshot import HostBuffers

_TRANSIENT: Final = frozenset({errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN, errno.EINTR})
_LOOK_AGAIN_S: Final = (0.1, 1.0, 3.0)
"""A network file system may need a moment to show what another node wrote."""
_PAUSES_S: Final = (0.2, 2.0)
"""Before the second and the third try; training goes on meanwhile."""

log = structlog.get_logger(__name__)


class CheckpointWriter:
    """Writes the checkpoints of one worker, one at a time, in a thread of its own.

    A checkpoint that cannot be written is counted and warned of; training goes on with the last
    good one. Only being overtaken by a newer generation is an error.

    Attributes:
        written: Checkpoints that are durable.
        durable_step: Finished steps that the newest of them holds; -1 before the first.
        failures: Writes that failed.
        skipped: Checkpoints that were due while another was still being written.
        last_error: Why the last write failed, "" if it did not.
        stall_s: Seconds for which the last copy held up training.
        write_s: Seconds that the last write took, behind it.
    """

    def __init__(self, directory: Checkpoints, *, clock: Clock) -> None:
        self.directory = directory
        self.written = 0
        self.durable_step = -1
        self.failures = 0
        self.skipped = 0
        self.last_error = ""
        self.stall_s = 0.0
        self.write_s = 0.0
        self._clock = clock
        self._buffers = HostBuffers()
        self._thread: threading.Thread | None = None
        self._stale: StaleGeneration | None = None

    def reserve(self, state: Any) -> None:
        """Take the memory for copies of such states now, so that the first one is as quick as the others.

        Raises:
            TypeError: The state holds something that is not plain.
        """
        self._buffers.copy(state)

    def claim(self, token: Token, owner: str) -> bool:
        """Become the only writer of the directory; return whether that is written down there.

        A directory that cannot be written counts as a failure.

        Raises:
            StaleGeneration: A newer token was claimed before.
        """
        try:
            self.directory.claim(token, owner)
        except OSError as error:
            self._fail(-1, f"the directory cannot be claimed: {error}")
            return False
        return True

    def check_shared(self, token: Token) -> None:
        """Check that the claim which rank 0 has placed is seen from this node, too.

        Raises:
            RefusedInput: It is not: checkpoints would be lost with rank 0's node.
        """
        for pause_s in (*_LOOK_AGAIN_S, None):
            try:
                if self.directory.sees(token):
                    return
            except OSError as error:
                log.warning("checkpoints cannot be seen", directory=self.directory.location, why=str(error))
                return
            if pause_s is not None:
                threading.Event().wait(pause_s)
        raise RefusedInput(
            [
                f"checkpoint.directory: {self.directory.location!r} on this node is not the one that rank 0 "
                "writes to: give a directory that all nodes share, or a URL"
            ]
        )

    def begin(self, state: Any, manifest: Manifest) -> bool:
        """Copy a state and write it in the background; skip it if a write is still going on.

        Raises:
            StaleGeneration: The write before was refused.
            TypeError: The state holds something that is not plain.
        """
        if self.is_writing:
            self.skipped += 1
            log.warning("checkpoint skipped", step=manifest.step, why="the one before is still being written")
            return False
        self._raise_if_stale()
        start = self._clock.monotonic()
        copy = self._buffers.copy(state)
        self.stall_s = self._clock.monotonic() - start
        # No daemon: torch aborts a process that ends in the middle of a save.
        self._thread = threading.Thread(
            target=self._write, args=(copy, manifest), name="checkpoint-writer", daemon=False
        )
        self._thread.start()
        return True

    def save(self, state: Any, manifest: Manifest, *, timeout_s: float) -> bool:
        """Write a state and wait until it is durable; return whether it is.

        A write that is going on is waited for first.

        Raises:
            StaleGeneration: A newer generation may write, this one may not.
        """
        start = self._clock.monotonic()
        if not self.wait(timeout_s):
            self._fail(manifest.step, f"the write before it did not end within {timeout_s:.0f} s")
            return False
        before = self.written
        self.begin(state, manifest)
        if not self.wait(max(0.0, timeout_s - (self._clock.monotonic() - start))):
            self._fail(manifest.step, f"it was not written within {timeout_s:.0f} s")
            return False
        return self.written > before

    def wait(self, timeout_s: float) -> bool:
        """Wait for the write that is going on; return whether none is any more.

        Raises:
            StaleGeneration: It was refused.
        """
        if self._thread is not None:
            self._thread.join(timeout_s)
        self._raise_if_stale()
        return not self.is_writing

    @property
    def is_writing(self) -> bool:
        """Whether a write is going on."""
        return self._thread is not None and self._thread.is_alive()

    def _raise_if_stale(self) -> None:
        stale, self._stale = self._stale, None
        if stale is not None:
            raise stale

    def _write(self, state: Any, manifest: Manifest) -> None:
        start = self._clock.monotonic()
        try:
            path = self._write_again_if_worth_it(state, manifest)
        except StaleGeneration as error:
            self._stale = error
        except Exception as error:  # the outermost loop of this thread: every error becomes a state
            self._fail(manifest.step, f"{type(error).__name__}: {error}")
        else:
            self.written += 1
            self.durable_step = manifest.step
            self.last_error = ""
            self.write_s = self._clock.monotonic() - start
            log.info("checkpoint written", path=path, step=manifest.step, seconds=round(self.write_s, 3))

    def _write_again_if_worth_it(self, state: Any, manifest: Manifest) -> str:
        """Write; a mount that was replaced under the run, or a lost connection, is good the next time."""
        for pause_s in _PAUSES_S:
            try:
                return self.directory.write(state, manifest)
            except OSError as error:
                if error.errno not in _TRANSIENT:
                    raise
                log.warning("checkpoint tried again", directory=self.directory.location, why=str(error))
                threading.Event().wait(pause_s)
        return self.directory.write(state, manifest)

    def _fail(self, step: int, why: str) -> None:
        self.failures += 1
        self.last_error = why
        log.warning("checkpoint not written", directory=self.directory.location, step=step, why=why)
