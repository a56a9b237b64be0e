"""A run's figures for Prometheus, made anew at each scrape from what the flow saw last."""

from __future__ import annotations

import errno
import json
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from elastic_core.errors import RefusedInput
from elastic_core.events.ledger import Spent
from elastic_core.model.job import JobSpec, MetricsEndpoint
from elastic_core.model.membership import Cause
from elastic_core.model.node import NodePhase
from flows.audience import RunSnapshot
from flows.live import spent_so_far


class RunMetrics(Collector):
    """Collects the figures of the run that was shown last; nothing before the first one."""

    def __init__(self) -> None:
        self._snapshot: RunSnapshot | None = None
        self._waits = CheckpointWaits()

    def show(self, snapshot: RunSnapshot) -> None:
        """Let the next scrape tell this; costs nothing."""
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        """Return all figures; called in the thread of a scrape."""
        snapshot = self._snapshot
        if snapshot is None:
            return []
        waited = self._waits.read(snapshot.attempt.directory.path / "metrics.jsonl")
        return list(figures_of(snapshot, now=time.time(), checkpoint_wait_s=waited))


class CheckpointWaits:
    """Adds up the seconds that checkpoints held training up; reads only what is new in the file."""

    def __init__(self) -> None:
        self._path = Path()
        self._offset = 0
        self._seconds = 0.0

    def read(self, path: Path) -> float:
        """Return the seconds so far."""
        if path != self._path:
            self._path, self._offset, self._seconds = path, 0, 0.0
        with suppress(FileNotFoundError), path.open("rb") as stream:
            stream.seek(self._offset)
            for line in stream:
                if not line.endswith(b"\n"):  # it is being written
                    break
                self._offset += len(line)
                with suppress(ValueError, TypeError, AttributeError):
                    self._seconds += float(json.loads(line).get("checkpoint_s") or 0.0)
        return self._seconds


def figures_of(snapshot: RunSnapshot, *, now: float, checkpoint_wait_s: float = 0.0) -> Iterator[Metric]:
    """Yield the figures of a run at one moment."""
    attempt = snapshot.attempt
    told = {"run": attempt.directory.run, "job_name": attempt.job.name, "attempt": str(attempt.number)}
    info = GaugeMetricFamily("elastic_run_info", "The run that is told of; always 1.", labels=list(told))
    info.add_metric(list(told.values()), 1)
    yield info
    yield from _progress(snapshot)
    yield from _nodes(snapshot)
    yield from _generations(snapshot)
    yield from _checkpoints(attempt.job, attempt.directory.path, now=now, waited=checkpoint_wait_s)
    spent = spent_so_far(snapshot, now)
    whole = sum(spent.values())
    learned = spent.get(Spent.TRAIN, 0.0)
    yield _gauge(
        "elastic_goodput_ratio", "Share of the time spent on new steps.", learned / whole if whole else 0
    )
    yield _labelled(
        # No counter: a step that turns out to be lost moves from one class to another.
        GaugeMetricFamily("elastic_ledger_seconds", "Wall time by class.", labels=["spent"]),
        {str(name): spent.get(name, 0.0) for name in Spent},
    )


def _progress(snapshot: RunSnapshot) -> Iterator[Metric]:
    progress = snapshot.observation.progress
    yield CounterMetricFamily("elastic_steps", "Finished steps.", value=progress.step if progress else 0)
    yield CounterMetricFamily(
        "elastic_samples", "Trained samples.", value=progress.samples if progress else 0
    )
    if progress is None:
        return
    yield _gauge("elastic_planned_steps", "Steps of the whole job; 0: not known.", progress.total_steps)
    for name, metric in (
        ("elastic_samples_per_second", "images_per_s"),
        ("elastic_loss", "loss"),
        ("elastic_accuracy_ratio", "accuracy"),
    ):
        if metric in progress.metrics:
            yield _gauge(name, f"The newest {metric} that training told.", progress.metrics[metric])


def _nodes(snapshot: RunSnapshot) -> Iterator[Metric]:
    seen = snapshot.observation
    nodes = GaugeMetricFamily("elastic_nodes", "Nodes by what they do.", labels=["state"])
    warming = sum(record.phase is NodePhase.WARMING for record in seen.nodes)
    training = seen.current.group_world_size if seen.current else 0
    yield _labelled(nodes, {"training": training, "warming": warming, "registered": len(seen.nodes)})
    alive = {record.node_id for record in seen.nodes}
    slow = {found.node_id for found in seen.slow if found.is_slow} & alive
    yield _gauge("elastic_slow_nodes", "Nodes that are slower than the others.", len(slow))
    wanted = seen.target.nodes if seen.target else snapshot.attempt.job.nodes.target
    yield _gauge("elastic_target_nodes", "Nodes that are wanted.", wanted)
    yield _gauge("elastic_workers", "Workers that train.", seen.current.world_size if seen.current else 0)


def _generations(snapshot: RunSnapshot) -> Iterator[Metric]:
    generations = [entry.generation for entry in snapshot.observation.history]
    causes = Counter(generation.cause for generation in generations)
    family = CounterMetricFamily("elastic_generations", "Generations by their cause.", labels=["cause"])
    yield _labelled(family, {str(cause): causes[cause] for cause in Cause})
    faults = CounterMetricFamily("elastic_faults", "Changes that nobody had planned.", labels=["cause"])
    yield _labelled(faults, {str(cause): causes[cause] for cause in (Cause.LOSS, Cause.FAILURE)})
    spent = generations[-1].restart_count if generations else 0
    yield CounterMetricFamily("elastic_restarts", "Restarts spent, of max_restarts.", value=spent)


def _checkpoints(job: JobSpec, run_dir: Path, *, now: float, waited: float) -> Iterator[Metric]:
    yield CounterMetricFamily(
        "elastic_checkpoint_wait_seconds", "Time in which training stood still for checkpoints.", value=waited
    )
    directory = Path(job.checkpoint.directory) if job.checkpoint.directory else run_dir / "checkpoints"
    written = [path.stat().st_mtime for path in directory.glob("step-*/manifest.json")]
    if written:
        age = max(0.0, now - max(written))
        yield _gauge("elastic_checkpoint_age_seconds", "Since the newest durable checkpoint.", age)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: dict[str, float]) -> Metric:
    for label, value in values.items():
        family.add_metric([label], value)
    return family


@contextmanager
def exported(endpoint: MetricsEndpoint) -> Iterator[RunMetrics]:
    """Answer scrapes within, if the job asks for it.

    Raises:
        RefusedInput: The port is taken.
    """
    metrics = RunMetrics()
    if not endpoint.port:
        yield metrics
        return
    registry = CollectorRegistry()
    registry.register(metrics)
    try:
        server, thread = start_http_server(endpoint.port, endpoint.host, registry)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EACCES, errno.EADDRNOTAVAIL):
            raise
        place = f"{endpoint.host}:{endpoint.port}"
        raise RefusedInput(
            [f"metrics.port: {place} cannot be used ({error.strerror}): choose another one, or 0 for none"]
        ) from error
    try:
        yield metrics
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
