"""An agent's last words: how the run ended, the first root cause, and what followed from it."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_core.agent.events import Exit
from elastic_core.errors import StoreError
from elastic_core.ids import RunId
from elastic_core.model.codec import decode
from elastic_core.model.failure import Failure
from elastic_core.model.membership import Closed, Generation, Outcome
from elastic_core.model.progress import Progress
from elastic_core.store.keys import RunKeys
from elastic_core.store.protocol import Store

MAX_LINES = 10
_MAX_LINE = 600


def closed_before(store: Store, run: RunId) -> Exit | None:
    """Return how to end if the run is over already, so that nothing needs to be started.

    Raises:
        StoreError: The store does not say.
    """
    keys = RunKeys(run)
    entry = store.read(keys.closed)
    if entry is None:
        return None
    closed = decode(Closed, entry.value)
    progress = store.read(keys.progress)
    at = f" at step {decode(Progress, progress.value).step}" if progress else ""
    if closed.outcome is Outcome.SUCCEEDED:
        return Exit(code=closed.exit_code, reason=f"job finished{at}: {closed.reason}; nothing to do")
    hint = "give --rdzv-id another value to start a new run"
    return Exit(code=closed.exit_code, reason=f"is closed ({closed.outcome}){at}: {closed.reason}; {hint}")


def last_words(ended: Exit, failures: Sequence[Failure], run: RunId) -> list[str]:
    """Return the lines that a person reads first: at most ten, the root cause before what follows."""
    verdict = "ended well" if ended.code == 0 else f"ended with exit code {ended.code}"
    root = next((failure for failure in failures if not failure.consequence), None)
    lines = [_one_line(f"elastic-agent: run {run} {verdict}: {ended.reason}")]
    if ended.code and root is not None and root.headline() not in ended.reason:
        lines.append(_one_line(f"  root cause: {root.headline()}"))
    if ended.code:
        others = [failure for failure in failures if failure is not root]
        lines += [_one_line(f"  consequence: {failure.headline()}") for failure in others]
    if len(lines) > MAX_LINES:
        lines[MAX_LINES - 1 :] = [f"  and {len(lines) - MAX_LINES + 1} more"]
    return lines


def traceback_to_print(own: Sequence[Failure], failures: Sequence[Failure]) -> str:
    """Return the traceback that this agent prints for the whole run, "" if that is another one's task.

    Args:
        own: Failures of this node's workers that they did not print themselves.
        failures: Those of the end, of all nodes, in the order in which they were written.
    """
    root = next((failure for failure in failures if not failure.consequence), None)
    for failure in own:
        if root is not None and failure.wall_time == root.wall_time:
            return failure.traceback
    unlike = [failure for failure in own if root is None or failure.message != root.message]
    return unlike[0].traceback if unlike else ""


def failures_of_the_end(store: Store, run: RunId) -> list[Failure]:
    """Return the failures of the last generation in the order in which they were written; [] if unknown."""
    keys = RunKeys(run)
    try:
        current = store.read(keys.current)
        number = decode(Generation, current.value).number if current else 0
        entries = store.read_prefix(f"{keys.failures}{number:08d}/").entries
    except (StoreError, ValueError):
        return []
    return [decode(Failure, entry.value) for entry in sorted(entries, key=lambda entry: entry.created)]


def _one_line(text: str) -> str:
    flat = " ".join(text.split("\n"))
    return flat if len(flat) <= _MAX_LINE else f"{flat[:_MAX_LINE]}…"
