"""Terraform as a subprocess: typed events as progress, and an interruption that loses no state.

SIGKILL of an apply can leave resources that no state knows. So can SIGINT: it saves the state and
releases the lock, but the AWS provider drops its calls in flight, and what they make is in no state. So
Terraform gets a session of its own, where our terminal's Ctrl-C does not reach it; whatever ends us lets it
finish (minutes at most), and only a second interruption is passed on to it as a SIGINT.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from elastic_core.errors import InvalidRequest, ProviderUnavailable, RefusedInput

Listener = Callable[["TerraformEvent"], None]

_FINISHING: Final = (
    "interrupted: Terraform finishes first, for what is in flight would be in no state; "
    "interrupt again to cancel it all the same"
)

CANCEL_WAIT_S: Final = 600.0
"""How long a cancelled apply may take to finish what is in flight and save its state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TerraformEvent:
    """One line of `terraform … -json`.

    Attributes:
        kind: "planned_change", "apply_start", "apply_complete", "diagnostic", "change_summary"…
        message: What Terraform says of it.
        resource: Address of the resource, or "".
        action: "create", "update", "delete", "read"… of a change, or "".
        severity: "error" or "warning" for diagnostics, else "".
        detail: More of a diagnostic.
    """

    kind: str
    message: str
    resource: str = ""
    action: str = ""
    severity: str = ""
    detail: str = ""


class Terraform:
    """One root module with one state.

    Args:
        module: Directory of the root module (never written to).
        work: Directory of state, lock and provider links; one a cluster.
        variables: Values of its variables.
        environment: Additional environment: credentials, region, `AWS_ENDPOINT_URL`.
        listener: Called for each event.
    """

    def __init__(
        self,
        module: Path,
        work: Path,
        *,
        variables: Mapping[str, Any],
        environment: Mapping[str, str] | None = None,
        listener: Listener = lambda _: None,
    ) -> None:
        self._module = module.absolute()
        self._work = work.absolute()
        self._variables = dict(variables)
        self._environment = {
            **os.environ,
            **(environment or {}),
            "TF_IN_AUTOMATION": "1",
            "TF_INPUT": "0",
            "TF_DATA_DIR": str(self._work / "data"),
        }
        self._listener = listener

    @property
    def state(self) -> Path:
        """Path of the state file."""
        return self._work / "terraform.tfstate"

    def init(self) -> None:
        """Make providers and modules ready; does nothing that costs where they are.

        Raises:
            RefusedInput: There is no terraform on PATH.
            ProviderUnavailable: A provider could not be had.
        """
        if shutil.which("terraform", path=self._environment.get("PATH")) is None:
            raise RefusedInput(["terraform: not found on PATH; install Terraform 1.9 or newer"])
        self._work.mkdir(parents=True, exist_ok=True)
        done = self._run("init", "-no-color", "-input=false", f"-backend-config=path={self.state}")
        if done.returncode != 0:
            raise ProviderUnavailable(f"terraform init failed: {_last_lines(done.stderr)}")

    def apply(self) -> None:
        """Make the base, or bring it to what the module says; goes on after a cancelled apply.

        Raises:
            InvalidRequest: Terraform reported errors; the first comes first.
        """
        self._stream("apply", "-auto-approve", *self._variable_flags())

    def destroy(self) -> None:
        """End everything in the state. Raises as `apply` does."""
        if self.state.exists():
            self._stream("destroy", "-auto-approve", *self._variable_flags())

    def has_drift(self) -> bool:
        """Return whether a plan would change anything."""
        flags = ("-detailed-exitcode", "-no-color", "-input=false")
        done = self._run("plan", *flags, *self._variable_flags())
        if done.returncode not in (0, 2):
            raise InvalidRequest(f"terraform plan failed: {_last_lines(done.stderr)}")
        return done.returncode == 2

    def outputs(self) -> dict[str, Any]:
        """Return the values of all outputs."""
        done = self._run("output", "-json")
        if done.returncode != 0:
            raise InvalidRequest(f"terraform output failed: {_last_lines(done.stderr)}")
        return {name: output["value"] for name, output in json.loads(done.stdout).items()}

    # ---- running -------------------------------------------------------------------------------

    def _variable_flags(self) -> Iterator[str]:
        for name, value in self._variables.items():
            yield f"-var={name}={value if isinstance(value, str) else json.dumps(value)}"

    def _command(self, verb: str, flags: Sequence[str]) -> list[str]:
        return ["terraform", f"-chdir={self._module}", verb, *flags]

    def _run(self, verb: str, *flags: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self._command(verb, flags),
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
            start_new_session=True,
        )

    def _stream(self, verb: str, *flags: str) -> None:
        errors: list[TerraformEvent] = []
        with subprocess.Popen(
            self._command(verb, ("-json", "-input=false", *flags)),
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                for event in _events(process):
                    if event.severity == "error":
                        errors.append(event)
                    self._listener(event)
                process.wait()
            except BaseException:  # Ctrl-C, Prefect's termination signal, a listener's failure
                self._finish(process)
                raise
        if process.returncode != 0:
            told = "; ".join(f"{event.message} {event.detail}".strip() for event in errors)
            raise InvalidRequest(f"terraform {verb} failed: {told or f'exit code {process.returncode}'}")

    def _finish(self, process: subprocess.Popen[str]) -> None:
        """Let Terraform do the rest; a second interruption cancels it."""
        try:
            self._listener(TerraformEvent(kind="finishing", message=_FINISHING, severity="warning"))
            for event in _events(process):
                self._listener(event)
            process.wait()
        except BaseException:
            _cancel(process)
            raise


def _events(process: subprocess.Popen[str]) -> Iterator[TerraformEvent]:
    for line in process.stdout or ():
        try:
            data = json.loads(line)
        except ValueError:
            if text := line.strip():
                yield TerraformEvent(kind="output", message=text)
            continue
        yield parse(data)


def parse(data: Mapping[str, Any]) -> TerraformEvent:
    """Return the event that one line of Terraform's JSON holds."""
    diagnostic = data.get("diagnostic", {})
    change = data.get("hook") or data.get("change") or {}
    place = change.get("resource") or {}
    return TerraformEvent(
        kind=data.get("type", "output"),
        message=diagnostic.get("summary") or data.get("@message", ""),
        resource=place.get("addr", diagnostic.get("address", "")),
        action=change.get("action", ""),
        severity=diagnostic.get("severity", ""),
        detail=" ".join(diagnostic.get("detail", "").split()),
    )


def _cancel(process: subprocess.Popen[str]) -> None:
    """One SIGINT, then as long as it takes: a second one would make Terraform drop its state."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        if process.stdout:
            for _ in process.stdout:  # a full pipe would keep it from ending
                pass
        process.wait(CANCEL_WAIT_S)


def _last_lines(text: str, count: int = 5) -> str:
    return " / ".join(line.strip() for line in text.strip().splitlines()[-count:] if line.strip())
