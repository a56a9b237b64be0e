"""Is this node fit to compute? A small product, timed and checked, and a collective of two processes.

The fork server looks in a child of its own, where torch is imported already: a tenth of a second, before
the node can be counted on. By itself (`python -m elastic_core.agent.fitness`) it is what `elastic-train
doctor` runs.
"""

from __future__ import annotations

import json
import os
import re
import select
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Final

from elastic_core.agent.address import INTERFACE
from elastic_core.agent.preflight import PATIENCE_S, Finding, tell
from elastic_core.agent.process import die_with_parent

SIDE: Final = 256
SLOW_S: Final = 1.0
"""A product of two such matrices takes some milliseconds; so long means that nothing can be trained here."""
PAIR_NUMBERS: Final = 1 << 18
PAIR_S: Final = 10.0
CHECKS: Final = ("compute", "collective")


def look_at_computing() -> Finding:
    """Multiply, and see whether it is right, the same each time, and in time."""
    # Imported here and in the fork server only: the agent does without.
    import torch

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randint(-8, 9, (SIDE, SIDE), generator=generator).float()
    expected = (matrix.long() @ matrix.long()).float()  # whole numbers: exact in either
    took = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        product = matrix @ matrix
        took = min(took, time.perf_counter() - began)
        if not torch.equal(product, expected):
            wrong = int((product != expected).sum())
            told = f"{wrong} of {SIDE * SIDE} entries of a matrix product are wrong"
            return Finding(
                "compute", told, "take this machine out of service: its processor or memory is broken"
            )
    told = f"a product of {SIDE} x {SIDE} takes {took * 1e3:.1f} ms ({2 * SIDE**3 / took / 1e9:.1f} GFLOP/s)"
    if took > SLOW_S:
        return Finding("compute", told, f"more than {SLOW_S:g} s: see what else runs here, and its CPU limit")
    return Finding("compute", told)


def look_at_collective() -> Finding:
    """Let two processes of this node exchange a mebibyte, over the interface that training will use."""
    import torch.distributed as dist

    interface = os.environ.get(INTERFACE, "") or "the one of the machine's name"
    remedy = f"see whether the interface is up and may talk to itself; name another by {INTERFACE}"
    if not dist.is_available():
        return Finding("collective", "this torch has no torch.distributed", "install another build of torch")
    with tempfile.TemporaryDirectory(prefix="et-pair-") as place:
        began = time.perf_counter()
        own, peer = os.getpid(), os.fork()
        if peer == 0:
            die_with_parent(own)
            os._exit(_pair_up(f"{place}/store", 1))
        try:
            why = "" if _pair_up(f"{place}/store", 0) == 0 else "the gathered numbers are wrong"
        except RuntimeError as error:
            text = (str(error) or type(error).__name__).splitlines()[0]
            why = re.sub(r"^\[[^]]*\] ", "", text)  # a place in Gloo's source
        finally:
            os.kill(peer, signal.SIGKILL)
            os.waitpid(peer, 0)
        took = time.perf_counter() - began
    if why:
        return Finding("collective", f"two processes over {interface}: {why}", remedy)
    return Finding("collective", f"two processes exchange 1 MiB over {interface} in {took:.2f} s")


def _pair_up(store: str, rank: int) -> int:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    timeout = timedelta(seconds=PAIR_S)
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2, timeout=timeout)
    own = torch.full((PAIR_NUMBERS,), float(rank + 1))
    gathered = [torch.empty_like(own), torch.empty_like(own)]
    dist.all_gather(gathered, own)
    is_right = all(bool((part == number + 1).all()) for number, part in enumerate(gathered))
    if rank == 1:  # killed once the other is done: whoever leaves first would break the other's end
        signal.pause()
    return 0 if is_right else 1


def looks() -> Iterator[Finding]:
    """Yield what each look finds."""
    yield look_at_computing()
    yield look_at_collective()


def bad_in_child() -> str:
    """Look in a forked child, and return what is bad, in one line each; "": the node is fit.

    For a process without threads that has imported torch, and goes on as if nothing had happened.
    """
    reading, writing = os.pipe()
    own, child = os.getpid(), os.fork()
    if child == 0:
        die_with_parent(own)
        os.close(reading)
        os.setsid()
        _tell_and_end(writing)
    os.close(writing)
    said, deadline = b"", time.monotonic() + PATIENCE_S
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0 and poll.poll(left * 1000):
        piece = os.read(reading, 1 << 16)
        if not piece:
            break
        said += piece
    os.close(reading)
    os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    found = [Finding(**json.loads(line)) for line in said.splitlines()]
    if len(found) < len(CHECKS):
        code = os.waitstatus_to_exitcode(status)
        why = f"it was killed after {PATIENCE_S:g} s" if code == -signal.SIGKILL else f"it ended with {code}"
        found.append(Finding(CHECKS[len(found)], why, "see the log of the fork server"))
    return "; ".join(finding.sentence() for finding in found if finding.remedy)


def _tell_and_end(descriptor: int) -> None:
    os.dup2(descriptor, 1)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    try:
        tell(looks())
    finally:
        sys.stdout.flush()
        os._exit(0 if sys.exc_info()[0] is None else 1)


if __name__ == "__main__":
    tell(looks())
