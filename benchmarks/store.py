"""How fast the store is: calls, watch events, the end of a lease, and the way back after a restart.

    python -m benchmarks.store [--json PATH|-] [--n 200] [--restarts 5]

Beside our client stands the client library as it comes (`cslab-etcd3`), on the
same server. Every number is from the caller's point of view on one machine.
"""

from __future__ import annotations

import argparse
import contextlib
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import etcd3

from benchmarks.rows import Row, log_to_stderr, machine_facts, print_report
from elastic_core.ids import NO_REVISION
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.protocol import KeyDeleted, KeyWritten, Modified, Put, WatchEvent, WatchRestarted
from elastic_core.store.server import EtcdOptions, EtcdServer

OURS = "elastic-train"
LIBRARY = "cslab-etcd3"
VALUE = bytes(200)


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    parser.add_argument("--n", type=int, default=200, help="measurements a case")
    parser.add_argument("--restarts", type=int, default=5, help="restarts of the server")
    arguments = parser.parse_args()
    log_to_stderr()
    facts = machine_facts()
    with tempfile.TemporaryDirectory() as directory:
        server = EtcdServer(Path(directory), EtcdOptions(ends_with_parent=True))
        with server, contextlib.closing(EtcdStore(server.endpoint)) as store:
            rows = [
                *measure_calls(store, arguments.n),
                measure_put_to_event(store, arguments.n),
                measure_revoke_to_event(store, arguments.n),
                *measure_library(server, arguments.n),
                *measure_restarts(server, store, arguments.restarts),
            ]
    print_report(rows, arguments.json, facts=facts)


def timed(act: Callable[[], object], n: int) -> list[float]:
    """Return the milliseconds of each of `n` calls, after a few that are not counted."""
    for _ in range(min(n, 10)):
        act()
    times = []
    for _ in range(n):
        started = time.perf_counter()
        act()
        times.append((time.perf_counter() - started) * 1e3)
    return times


def measure_calls(store: EtcdStore, n: int) -> Iterator[Row]:
    """Measure single calls."""
    calls: dict[str, Callable[[], object]] = {
        "put": lambda: store.put("/bench/a", VALUE),
        "read": lambda: store.read("/bench/a"),
        "transact": lambda: store.transact([Modified("/bench/none", NO_REVISION)], [Put("/bench/a", VALUE)]),
        "grant": lambda: store.grant(60),
    }
    for case, call in calls.items():
        yield Row.of(timed(call, n), peer=OURS, case=case, unit="ms")


@contextlib.contextmanager
def watching(store: EtcdStore, key: str) -> Iterator[queue.SimpleQueue[tuple[float, WatchEvent]]]:
    """Watch a key in a thread; hand out each event with the time at which it came."""
    events: queue.SimpleQueue[tuple[float, WatchEvent]] = queue.SimpleQueue()
    watch = store.watch([key])

    def collect() -> None:
        for event in watch:
            events.put((time.perf_counter(), event))

    thread = threading.Thread(target=collect)
    thread.start()
    events.get(timeout=5)
    try:
        yield events
    finally:
        watch.close()
        thread.join()


def arrival(events: queue.SimpleQueue[tuple[float, WatchEvent]], kind: type) -> float:
    """Return when the next event of this kind came."""
    while True:
        came, event = events.get(timeout=5)
        if isinstance(event, kind):
            return came


def measure_put_to_event(store: EtcdStore, n: int) -> Row:
    """Measure from before a write to its event in another thread."""
    times = []
    with watching(store, "/bench/watched") as events:
        for _ in range(n + 10):
            started = time.perf_counter()
            store.put("/bench/watched", VALUE)
            times.append((arrival(events, KeyWritten) - started) * 1e3)
    return Row.of(times[10:], peer=OURS, case="put to watch event", unit="ms")


def measure_revoke_to_event(store: EtcdStore, n: int) -> Row:
    """Measure from before a revocation to the event of the key's end: how long a fence takes."""
    times = []
    with watching(store, "/bench/leased") as events:
        for _ in range(n):
            lease = store.grant(60)
            store.put("/bench/leased", VALUE, lease)
            started = time.perf_counter()
            store.revoke(lease)
            times.append((arrival(events, KeyDeleted) - started) * 1e3)
    return Row.of(times, peer=OURS, case="revoke to watch event", unit="ms")


def measure_library(server: EtcdServer, n: int) -> Iterator[Row]:
    """Measure the client library by itself."""
    host, _, port = server.endpoint.rpartition(":")
    client = etcd3.client(host, int(port), timeout=2)
    yield Row.of(timed(lambda: client.put("/bench/b", VALUE), n), peer=LIBRARY, case="put", unit="ms")
    yield Row.of(timed(lambda: client.get("/bench/b"), n), peer=LIBRARY, case="read", unit="ms")
    arrivals: queue.SimpleQueue[float] = queue.SimpleQueue()
    watch = client.add_watch_callback("/bench/w", lambda _: arrivals.put(time.perf_counter()))
    times = []
    for _ in range(n + 10):
        started = time.perf_counter()
        client.put("/bench/w", VALUE)
        times.append((arrivals.get(timeout=5) - started) * 1e3)
    client.cancel_watch(watch)
    client.close()
    yield Row.of(times[10:], peer=LIBRARY, case="put to watch event", unit="ms")


def measure_restarts(server: EtcdServer, store: EtcdStore, n: int) -> Iterator[Row]:
    """Measure a server's start, and from there the first write and the first event of an old watch."""
    starts, writes, seen = [], [], []
    with watching(store, "/bench/restart") as events:
        for number in range(n):
            server.kill()
            began = time.perf_counter()
            server.start()
            up = time.perf_counter()
            store.put("/bench/restart", b"%d" % number)
            written = time.perf_counter()
            came = newest(events, b"%d" % number)
            starts.append(up - began)
            writes.append((written - up) * 1e3)
            seen.append(max(came - up, 0.0) * 1e3)
    yield Row.of(starts, peer=OURS, case="start of the server until it answers", unit="s")
    yield Row.of(writes, peer=OURS, case="first write after a restart", unit="ms")
    yield Row.of(seen, peer=OURS, case="first watch event after a restart", unit="ms")


def newest(events: queue.SimpleQueue[tuple[float, WatchEvent]], value: bytes) -> float:
    """Return when the watch first showed this value, as an event or in a fresh read."""
    while True:
        came, event = events.get(timeout=10)
        match event:
            case KeyWritten(entry) if entry.value == value:
                return came
            case WatchRestarted(snapshot) if any(entry.value == value for entry in snapshot.entries):
                return came


if __name__ == "__main__":
    main()
