"""Specs of petctl (pytorch/elastic on AWS), with the command line that used them."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any, Final, NoReturn

from pydantic import Field

from elastic_core.errors import RefusedInput
from tasks.importers.document import Document
from tasks.importers.draft import Draft, Foreign, tell_unknown, understand
from tasks.importers.gpus import has_gpu
from tasks.importers.launches import ask_gpus

_OF_THE_BASE: Final = "the base of infra/terraform has its own"
_DROPPED: Final = {
    "instance_role": _OF_THE_BASE,
    "key_pair": "nodes are not logged into",
    "subnets": _OF_THE_BASE,
    "security_groups": _OF_THE_BASE,
    "efs_file_system_id": _OF_THE_BASE,
    "user_data_template": "nodes start by a script of ours",
    "s3_bucket": "scripts are not uploaded: put them into the image",
    "s3_prefix": "scripts are not uploaded: put them into the image",
    "ebs_volume_size": _OF_THE_BASE,
    "ebs": _OF_THE_BASE,
}


class Group(Foreign):
    """A group of machines: of workers, or of etcd."""

    instance_type: str
    accelerator: str = "none"
    docker_image: str = ""
    max_spot_price: str | float | None = None
    instance_role: Any = None
    key_pair: Any = None
    subnets: Any = None
    security_groups: Any = None
    efs_file_system_id: Any = None
    user_data_template: Any = None
    s3_bucket: Any = None
    s3_prefix: Any = None
    ebs_volume_size: Any = None
    ebs: Any = None


class Specs(Foreign):
    """The file."""

    worker: Group
    rdzv: dict[str, Any] = Field(default_factory=dict)


def is_specs(data: Any) -> bool:
    """Return whether data are petctl's."""
    return (
        isinstance(data, dict) and isinstance(data.get("worker"), dict) and "instance_type" in data["worker"]
    )


def translate(document: Document, command: Sequence[str]) -> Draft:
    """Return the job of a spec and of the `petctl … run_job …` that used it.

    Raises:
        RefusedInput: One of them cannot be understood.
    """
    specs = understand(Specs, document)
    draft = Draft(document.source)
    worker = specs.worker
    draft.name("petctl", "its name")
    draft.set("pool", {"kind": "aws", "instance_types": [worker.instance_type]})
    draft.set("pool.market", "on-demand")
    if worker.max_spot_price is not None:
        draft.set("pool.market", "spot")
        draft.say(
            document.at(("worker", "max_spot_price")),
            f"{worker.max_spot_price!r} means spot; the price itself is dropped: spot is paid at the "
            "market's price, and pool.budget_usd limits what a run may cost",
        )
    if worker.accelerator not in ("none", ""):
        place = document.at(("worker", "accelerator"))
        ask_gpus(draft, 1, place, has_gpu=has_gpu(worker.instance_type))
    if worker.docker_image:
        draft.drop(
            document.at(("worker", "docker_image")),
            worker.docker_image,
            "a node needs elastic-agent: build an image on yours and name it in pool.image",
        )
    for key, why in _DROPPED.items():
        if getattr(worker, key) is not None:
            draft.drop(document.at(("worker", key)), getattr(worker, key), why)
    if specs.rdzv:
        draft.say(document.at(("rdzv",)), "is dropped: a run brings its own etcd")
    tell_unknown(draft, specs, document)
    _apply(draft, command)
    return draft


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RefusedInput([f"petctl: {message}"])


def _apply(draft: Draft, command: Sequence[str]) -> None:
    """Fill a draft with what `petctl run_job` says; a spec alone names no program."""
    if not command:
        draft.nodes(least=1, most=1, target=1, place="petctl --size")
        draft.set("training", {"kind": "script", "script": "train.py"})
        draft.say(
            "its command line",
            "is not here, and says how many nodes train which script: the job has one node and 'train.py'; "
            "give it after the file: -- petctl run_job --size 2 --name NAME SCRIPT ARGS",
        )
        return
    options = _make_parser().parse_args([word for word in command if word not in ("petctl", "run_job")])
    if options.name:
        draft.name(options.name, "petctl --name")
    least = options.size if options.min_size is None else options.min_size
    most = options.size if options.max_size is None else options.max_size
    if not least <= options.size <= most:
        raise RefusedInput([f"petctl: --size {options.size} does not lie between {least} and {most}"])
    draft.nodes(least=least, most=most, target=options.size, place="petctl --size")
    if options.region:
        draft.set("pool.region", options.region)
    draft.set("training", {"kind": "script", "script": options.script})
    if options.args:
        draft.set("training.args", list(options.args))


def _make_parser() -> _Parser:
    parser = _Parser(prog="petctl", add_help=False)
    parser.add_argument("--region", default="")
    parser.add_argument("--specs_file", "-f")
    parser.add_argument("--name", default="")
    parser.add_argument("--size", type=int, default=1)
    parser.add_argument("--min_size", type=int)
    parser.add_argument("--max_size", type=int)
    parser.add_argument("script")
    parser.add_argument("args", nargs=argparse.REMAINDER)
    return parser
