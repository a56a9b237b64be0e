"""What Docker tests need: an engine and an image of a stub agent; a machine without them fails CI."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path
from typing import Any, NoReturn

import docker
import pytest
from docker.errors import DockerException

from elastic_core.ids import RunId
from elastic_core.store.server import find_etcd
from tasks.providers import docker_engine

RUN = RunId(f"digits-{secrets.token_hex(4)}")
"""An engine is shared by all of a machine, so every session of tests has names of its own."""

BASE = os.environ.get("ELASTIC_TEST_BASE", "elastic-base:bookworm")
"""Image with Python 3, made by `tests/docker/make_base.sh`."""

STUB = "elastic-train-stub:test"
IMAGE = os.environ.get("ELASTIC_TEST_IMAGE", "elastic-train:test")
"""The product's own image."""


def required_client() -> Any:
    """Return the engine's client."""
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        missing(f"no Docker engine answers: {error}")
    return client


def required_image(client: Any, name: str) -> str:
    """Return the image's name if it is there."""
    if not client.images.list(name):
        missing(f"there is no image {name}: run `make test-docker`")
    return name


def make_stub_image(client: Any, context: Path) -> str:
    """Build the image of the stub agent, with etcd beside it."""
    required_image(client, BASE)
    stub = Path(__file__).parents[1] / "tasks" / "providers" / "stub_agent.py"
    shutil.copy(stub, context)
    shutil.copy(find_etcd(), context / "etcd")
    (context / "Dockerfile").write_text(
        f"FROM {BASE}\nCOPY etcd /usr/local/bin/\nCOPY stub_agent.py /\n"
        'ENTRYPOINT ["python3", "-u", "/stub_agent.py"]\n'
    )
    client.images.build(path=str(context), tag=STUB, rm=True)
    return STUB


def left_of(client: Any, run: RunId) -> list[str]:
    """Return the names of everything on the engine that belongs to a run."""
    networks = client.networks.list(filters={"label": f"{docker_engine.RUN_LABEL}={run}"})
    return [thing.name for thing in (*docker_engine.containers_of(client, run), *networks)]


def missing(reason: str) -> NoReturn:
    """Fail in CI, where nothing may be left out unseen; skip elsewhere."""
    if os.environ.get("CI"):
        pytest.fail(reason)
    pytest.skip(reason)
