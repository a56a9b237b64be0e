"""`elastic-agent`: run the training workers of one node."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from elastic_core.agent.address import INTERFACE, address_towards
from elastic_core.agent.arguments import parse_arguments
from elastic_core.agent.directory import PrivateDirectory
from elastic_core.agent.driver import AgentDriver
from elastic_core.agent.events import Exit
from elastic_core.agent.logs import LogContext, set_up_logs
from elastic_core.agent.preflight import look_at_interface, look_at_places
from elastic_core.agent.report import (
    closed_before,
    failures_of_the_end,
    last_words,
    traceback_to_print,
)
from elastic_core.agent.settings import AgentSettings, places_of
from elastic_core.clock import SystemClock
from elastic_core.errors import RefusedInput, StoreError
from elastic_core.exits import ExitCode
from elastic_core.model.failure import Failure
from elastic_core.store.endpoint import parse_endpoints
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.preflight import check_endpoint
from elastic_core.store.server import EtcdOptions, EtcdServer


def main() -> None:
    """Run the agent that the command line describes, and exit as the table of exit codes says."""
    try:
        settings = parse_arguments(sys.argv[1:])
        code = run_agent(settings)
    except RefusedInput as error:
        for problem in error.problems:
            _print(f"elastic-agent: {problem}")
        code = ExitCode.REFUSED
    sys.stdout.flush()
    sys.exit(code)


def run_agent(settings: AgentSettings) -> int:
    """Run an agent to its end and return its exit code.

    Raises:
        RefusedInput: The store does not answer, or this node has no address; nothing was started.
    """
    for notice in settings.notices:
        _print(f"elastic-agent: {notice}")
    with _endpoint_of(settings) as endpoint:
        return _take_part(settings, endpoint)


def _take_part(settings: AgentSettings, endpoint: str) -> int:
    check_endpoint(endpoint, tls=settings.tls)
    address = settings.advertise or address_towards(*parse_endpoints(endpoint))
    context = LogContext(run=settings.run, node=settings.name)
    set_up_logs(context)
    store = EtcdStore(endpoint, tls=settings.tls, credentials=settings.credentials)
    try:
        own: Sequence[Failure] = ()
        ended = closed_before(store, settings.run)
        if ended is None:
            ended = _unfit(settings)
        if ended is None:
            driver = AgentDriver(settings, store, address=address, clock=SystemClock())
            context.source = driver
            ended = driver.run()
            own = driver.unprinted
        failures = failures_of_the_end(store, settings.run) if ended.code else []
        if ended.code and (trace := traceback_to_print(own, failures)):
            _print(trace.rstrip())
        for line in last_words(ended, failures, settings.run):
            _print(line)
        return ended.code
    except StoreError as error:
        raise RefusedInput([f"--rdzv-endpoint {endpoint!r}: {error}"]) from error
    finally:
        store.close()


def _unfit(settings: AgentSettings) -> Exit | None:
    """Return how to end if this node cannot write or speak where it must; it has not registered yet."""
    if not settings.preflight:
        return None
    found = [look_at_interface(os.environ.get(INTERFACE, "")), *look_at_places(places_of(settings))]
    bad = [finding.sentence() for finding in found if finding.remedy]
    return Exit(code=ExitCode.UNFIT, reason="; ".join(bad)) if bad else None


@contextmanager
def _endpoint_of(settings: AgentSettings) -> Iterator[str]:
    """Give the store's endpoint: the named one, or that of an etcd of our own."""
    if not settings.standalone:
        yield settings.endpoint
        return
    private = PrivateDirectory()
    try:
        with EtcdServer(private.path, EtcdOptions(ends_with_parent=True, fast_election=True)) as server:
            yield server.endpoint
    finally:
        private.remove()


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)  # noqa: T201 (a command line's own voice)


if __name__ == "__main__":
    main()
