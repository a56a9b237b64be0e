"""From a file or a command line to the text of a job file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import yaml

from elastic_core.agent.arguments import count_gpus
from elastic_core.errors import RefusedInput
from elastic_core.model.job import JobSpec, ScriptTraining
from elastic_core.model.job_file import MAX_BYTES, parse_job
from tasks.importers import classy, compose, elastic_job, petctl, pytorch_job, refusals, skypilot
from tasks.importers.document import Document, read_documents
from tasks.importers.draft import Draft
from tasks.importers.launcher import is_launcher, read_command
from tasks.importers.launches import apply_launch

Pool = Literal["", "local", "docker"]
FORMATS: Final = (
    "ElasticJob, PyTorchJob, petctl specs, Docker Compose, SkyPilot tasks, Classy Vision configs, "
    "torchrun commands"
)
_CLOUD: Final = ("cluster_name", "provider", "worker_nodes")


@dataclass(frozen=True, slots=True)
class Imported:
    """A job that was translated.

    Attributes:
        warnings: One line for everything that was changed or dropped.
    """

    job: JobSpec
    keys: dict[str, Any]
    warnings: tuple[str, ...]

    def text(self) -> str:
        """Return the job file; what was changed or dropped stands above it."""
        head = [f"# {line}" for line in ("Imported by `elastic-train import`.", *self.warnings)]
        body = yaml.safe_dump(
            self.keys, sort_keys=False, allow_unicode=True, width=100, default_flow_style=None
        )
        return "\n".join([*(line.replace("\n", " ") for line in head), body])


def import_file(
    path: Path,
    command: Sequence[str] = (),
    *,
    pool: Pool = "",
    data: str = "",
    gpus: Callable[[], int] = count_gpus,
) -> Imported:
    """Translate a foreign job file.

    Args:
        path: The file.
        command: The command line that used the file, if it names none itself (petctl).
        pool: Pool to use instead of the format's usual one.
        data: Directory of the images, for configs that name another one.
        gpus: Counts the GPUs of this machine.

    Raises:
        RefusedInput: It cannot become a job: one line a reason.
    """
    return import_text(_read(path), str(path), command, pool=pool, data=data, gpus=gpus)


def import_text(
    text: str,
    source: str,
    command: Sequence[str] = (),
    *,
    pool: Pool = "",
    data: str = "",
    gpus: Callable[[], int] = count_gpus,
) -> Imported:
    """Translate the text of a foreign job file; see `import_file`.

    Raises:
        RefusedInput: It cannot become a job: one line a reason.
    """
    if source.endswith(".tf"):
        raise RefusedInput([f"{source}: is Terraform, not a job; what outlives a job is in infra/terraform"])
    documents = read_documents(text, source)
    if not documents:
        raise RefusedInput([f"{source}: is empty; read: {FORMATS}"])
    if len(documents) > 1:
        refusals.refuse_several(documents)
    document = documents[0]
    return _finish(_translate(document, command, pool or "docker", data, gpus), pool, data)


def import_command(
    words: Sequence[str], *, pool: Pool = "", data: str = "", gpus: Callable[[], int] = count_gpus
) -> Imported:
    """Translate a launcher's command line; see `import_file`.

    Raises:
        RefusedInput: It cannot become a job: one line a reason.
    """
    draft = Draft("command line")
    draft.set("pool.kind", pool or "local")
    apply_launch(draft, read_command(words), "flags", gpus=gpus)
    return _finish(draft, pool, data)


def is_command(words: Sequence[str]) -> bool:
    """Return whether words are a command line, and not a file and the command line that used it."""
    return is_launcher(words) and not Path(words[0]).suffix


def pool_named(name: str) -> Pool:
    """Return a pool's name.

    Raises:
        RefusedInput: No import makes jobs for it.
    """
    match name:
        case "" | "local" | "docker":
            return name
    raise RefusedInput([f"--pool {name!r}: must be local or docker; what is for AWS becomes a job for AWS"])


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet.

    Raises:
        RefusedInput: It is, or it cannot be written.
    """
    try:
        with path.open("x") as file:
            file.write(text)
    except FileExistsError as error:
        raise RefusedInput(
            [f"--output {str(path)!r}: is there already; name another file or remove it"]
        ) from error
    except OSError as error:
        raise RefusedInput([f"--output {str(path)!r}: {error.strerror}; name another file"]) from error


def _translate(
    document: Document, command: Sequence[str], pool: str, data_directory: str, gpus: Callable[[], int]
) -> Draft:
    """Find out what a document is, and translate it.

    Raises:
        RefusedInput: It is nothing that can become a job.
    """
    data = document.data
    if not isinstance(data, dict):
        raise RefusedInput(
            [f"{document.source}: must be a mapping of keys, not {type(data).__name__}; read: {FORMATS}"]
        )
    _refuse_others(document, data)
    if unfilled := [] if classy.is_config(data) else document.unfilled():
        raise RefusedInput(unfilled)
    if "kind" in data and "apiVersion" in data:
        return _of_kubernetes(document, data["kind"], pool, gpus)
    if petctl.is_specs(data):
        return petctl.translate(document, command)
    if classy.is_config(data):
        return classy.translate(document, data_directory)
    if isinstance(data.get("services"), dict):
        return compose.translate(document, gpus)
    if skypilot.is_task(data):
        return skypilot.translate(document)
    if {"nodes", "training"} & data.keys():
        raise RefusedInput(
            [f"{document.source}: is a job file of ours already; `elastic-train validate` checks it"]
        )
    raise RefusedInput([f"{document.source}: is nothing that is read here; read: {FORMATS}"])


def _refuse_others(document: Document, data: dict[str, Any]) -> None:
    if data.get("kind") == "ScalePlan":
        refusals.refuse_scale_plan(document)
    if data.get("kind") == "Job":
        refusals.refuse_batch_job(document)
    if sum(key in data for key in _CLOUD) > 1:
        refusals.refuse_ray(document)
    if "deployments" in data and "kind" not in data:
        refusals.refuse_prefect(document)


def _of_kubernetes(document: Document, kind: object, pool: str, gpus: Callable[[], int]) -> Draft:
    if kind == "ElasticJob":
        return elastic_job.translate(document, pool, gpus)
    if kind == "PyTorchJob":
        return pytorch_job.translate(document, pool, gpus)
    refusals.refuse_kind(document, kind, ("ElasticJob", "PyTorchJob"))
    raise AssertionError(kind)  # refuse_kind never returns


def _finish(draft: Draft, pool: Pool, data: str) -> Imported:
    """Check a draft as a job file is checked; settle what depends on files that are here."""
    if pool and draft.get("pool.kind") != pool:
        raise RefusedInput(
            [f"{draft.origin}: --pool {pool}: this becomes a job for pool {draft.get('pool.kind')!r}"]
        )
    training = draft.job["training"]
    if training["kind"] == "classy" and isinstance(training["config"], str):
        classy.settle_config(draft, data)
    if draft.get("pool") == {"kind": "local"}:
        del draft.job["pool"]
    job = parse_job(draft.job, draft.origin)
    match job.training:
        case ScriptTraining(entry="script", script=script) if not Path(script).is_file():
            draft.say("training.script", f"{script!r} is not here: put it here, or change its path")
    keys = {key: draft.job[key] for key in JobSpec.model_fields if key in draft.job}
    return Imported(job, json.loads(json.dumps(keys)), tuple(draft.warnings))


def _read(path: Path) -> str:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RefusedInput([f"file {str(path)!r}: {error.strerror}; read: {FORMATS}"]) from error
    if len(content) > MAX_BYTES:
        raise RefusedInput([f"file {str(path)!r} has {len(content)} bytes; at most {MAX_BYTES} are read"])
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise RefusedInput([f"file {str(path)!r} is no text: {error.reason}"]) from error
