"""Exit codes: one documented table for agents, flows and commands.

A script's own code is passed through unchanged and a signal n becomes 128 + n,
so the codes here are those that no script would pick by accident
(`sysexits.h` where it has the meaning).
"""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What an agent or a command says with its exit status."""

    OK = 0
    """What was asked for is done."""
    FAILED = 1
    """A failure that has no code of its own (an exception in the script: 1, as Python says)."""
    REFUSED = 2
    """Bad input: nothing was started."""
    NO_SUCH_RUN = 3
    """The named job or run does not exist."""
    NOT_PROMOTED = 4
    """A model was trained again, and the gate did not let it take the champion's place."""
    BELOW_MINIMUM = 69
    """Too few nodes came within the join timeout."""
    NO_PROGRESS = 70
    """Generations followed each other without a new step."""
    UNFIT = 72
    """This node cannot train: a pre-flight check failed, which the message names. Others may."""
    PREEMPTED = 75
    """Stopped on purpose and resumable: the next start goes on at the saved step."""


def exit_code_of(returncode: int) -> int:
    """Map a `subprocess` return code (negative for a signal) to a shell's exit status."""
    return 128 - returncode if returncode < 0 else returncode
