"""Find what no run owns any more, and end it: the guarantee behind every teardown that did not happen.

A flow may be killed at any moment and a hook never runs, so this looks at the
places themselves. It decides by `tasks.ownership.judge`, and ends nothing of a
run while a flow could take it: it holds the job's lock meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field

from elastic_core.errors import ProviderError, RefusedInput
from elastic_core.ids import RunId
from elastic_core.model.job import AwsPool
from tasks.holdings import Holding, LocalPlace, Place
from tasks.ownership import Claim, Verdict, judge
from tasks.runs import RUNS, AlreadyRunning, NoSuchRun, RunDirectory, driven_run, job_lock

HOUR_S: Final = 3600.0


class Scope(BaseModel):
    """Where to look."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Scope")

    runs: str = Field(str(RUNS), min_length=1, description="Directory of all runs' directories.")
    local: bool = Field(True, description="Processes of this machine.")
    docker: bool = Field(True, description="Containers, networks and volumes of this machine's engine.")
    aws: tuple[AwsPool, ...] = Field((), description="Clusters whose instances to look at.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A thing, and what was decided of it."""

    holding: Holding
    verdict: Verdict
    outcome: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """What was found.

    Attributes:
        silent: Places that did not answer, each with why.
        left: What should have been ended and is still there, each with why.
    """

    findings: tuple[Finding, ...] = ()
    silent: dict[str, str] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)

    @property
    def orphans(self) -> tuple[Finding, ...]:
        """What nobody owns."""
        return tuple(finding for finding in self.findings if finding.verdict.is_orphan)

    def rows(self) -> list[dict[str, str]]:
        """Return a table: orphans first."""
        return [
            {
                "place": one.holding.place,
                "kind": one.holding.kind,
                "name": one.holding.name,
                "run": one.holding.run,
                "owner": "nobody" if one.verdict.is_orphan else "its run",
                "what": one.outcome or "; ".join(filter(None, (one.verdict.reason, one.holding.detail))),
            }
            for one in sorted(self.findings, key=lambda one: not one.verdict.is_orphan)
        ]

    def headline(self) -> str:
        """Say it in one sentence."""
        count = len(self.orphans)
        found = f"{len(self.findings)} found, {count} without an owner"
        done = sum(finding.outcome == ENDED for finding in self.orphans)
        told = f"{found}, {done} ended" if done else found
        if self.left:
            told += "; still there: " + ", ".join(f"{name} ({why})" for name, why in self.left.items())
        if self.silent:
            told += "; not looked at: " + ", ".join(f"{name} ({why})" for name, why in self.silent.items())
        return told


ENDED: Final = "ended"


def reconcile(scope: Scope, *, apply: bool = False, abandoned_after_s: float = HOUR_S) -> Survey:
    """Find what no run owns; end it if `apply`, else only tell.

    A place that does not answer keeps none of the others from being looked at.
    """
    findings: list[Finding] = []
    survey = Survey()
    for place in _places(scope, survey.silent):
        try:
            holdings = place.find()
        except ProviderError as error:
            survey.silent[place.name] = str(error)
            continue
        found = [
            Finding(
                holding=holding,
                verdict=judge(
                    claim_of(Path(scope.runs), holding.run),
                    abandoned_after_s=abandoned_after_s,
                    has_expired=holding.has_expired,
                    is_foreign=holding.is_foreign,
                ),
            )
            for holding in holdings
        ]
        findings += _end(place, found, Path(scope.runs), survey.left) if apply else found
    return Survey(findings=tuple(findings), silent=survey.silent, left=survey.left)


def teardown(run: str, scope: Scope) -> Survey:
    """End everything that one run has, in every place; its directory stays, and it can go on later.

    Raises:
        RefusedInput: A flow drives it.
        NoSuchRun: Nothing is known of it, here or anywhere.
    """
    root, survey = Path(scope.runs), Survey()
    claim = claim_of(root, RunId(run))
    if claim.is_driven:
        raise RefusedInput([f"run {run} is driven by a flow: end it with `elastic-train stop {run}`"])
    verdict = Verdict(is_orphan=True, reason="its teardown was asked for")
    findings: list[Finding] = []
    for place in _places(scope, survey.silent):
        try:
            mine = [holding for holding in place.find() if holding.run == run]
        except ProviderError as error:
            survey.silent[place.name] = str(error)
            continue
        found = [Finding(holding=holding, verdict=verdict) for holding in mine]
        findings += _end(place, found, root, survey.left)
    if not findings and not claim.is_known:
        raise NoSuchRun(run)
    return Survey(findings=tuple(findings), silent=survey.silent, left=survey.left)


def claim_of(root: Path, run: RunId) -> Claim:
    """Return what is known of a run."""
    directory = RunDirectory(root / run)
    if not directory.job_file.exists():
        return Claim(is_known=False)
    return Claim(
        is_known=True,
        is_driven=driven_run(root, directory.job().name) in ("", run),
        outcome=directory.outcome() or "",
        unattended_s=max(0.0, time.time() - directory.driven_at()),
    )


def _places(scope: Scope, silent: dict[str, str]) -> Iterator[Place]:
    """Yield the places to look at; a place's library is imported only where it is looked at."""
    runs = Path(scope.runs)
    if scope.local:
        yield LocalPlace(runs)
    if scope.docker:
        from tasks.providers.docker_place import DockerPlace

        try:
            yield DockerPlace(runs)
        except (ProviderError, RefusedInput) as error:
            silent[DockerPlace.name] = str(error)
    for pool in scope.aws:
        from tasks.providers.aws.place import AwsPlace

        yield AwsPlace(pool)


def _end(place: Place, findings: Sequence[Finding], root: Path, left: dict[str, str]) -> list[Finding]:
    """End the orphans among these, run by run, each under its job's lock; return what became of all."""
    done: list[Finding] = [finding for finding in findings if not finding.verdict.is_orphan]
    orphans = [finding for finding in findings if finding.verdict.is_orphan]
    for run in dict.fromkeys(finding.holding.run for finding in orphans):
        mine = [finding for finding in orphans if finding.holding.run == run]
        try:
            with _held(root, run):
                failed = place.remove([finding.holding for finding in mine])
        except AlreadyRunning:  # a flow came meanwhile and adopts it
            failed = {}
            mine = [
                Finding(holding=one.holding, verdict=Verdict(is_orphan=False, reason="a flow drives its run"))
                for one in mine
            ]
        except ProviderError as error:
            failed = {finding.holding.name: str(error) for finding in mine}
        left |= failed
        done += [
            Finding(
                holding=one.holding,
                verdict=one.verdict,
                outcome=failed.get(one.holding.name, ENDED if one.verdict.is_orphan else ""),
            )
            for one in mine
        ]
    return done


@contextmanager
def _held(root: Path, run: RunId) -> Iterator[None]:
    """Keep flows from the run; while another run of its job is driven, none can come for this one."""
    directory = RunDirectory(root / run)
    is_known = directory.job_file.exists()
    is_free = not is_known or driven_run(root, directory.job().name) not in (None, "", run)
    with nullcontext() if is_free else job_lock(root, directory.job().name):
        yield
