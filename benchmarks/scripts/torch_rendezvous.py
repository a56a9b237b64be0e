"""One generation of torch's dynamic rendezvous with a thread a node; prints the seconds it took."""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler


def main() -> None:
    """Bring so many nodes together as the first argument says."""
    count = int(sys.argv[1])
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    barrier = threading.Barrier(count)

    def join(_: int) -> float:
        store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
        handler = DynamicRendezvousHandler.from_backend(
            "run", store, C10dRendezvousBackend(store, "run"), count, count, local_addr="127.0.0.1"
        )
        barrier.wait()
        began = time.monotonic()
        handler.next_rendezvous()
        return time.monotonic() - began

    with ThreadPoolExecutor(count) as pool:
        sys.stdout.write(f"{max(pool.map(join, range(count)))}\n")
    sys.stdout.flush()
    os._exit(0)  # its threads keep nodes alive and know no end


if __name__ == "__main__":
    main()
