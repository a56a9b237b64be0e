"""A Docker engine with the stub agent's image, for those who ask for it."""

from typing import Any

import pytest

from tests.docker.engine import make_stub_image, required_client


@pytest.fixture(scope="session")
def docker_client() -> Any:
    return required_client()


@pytest.fixture(scope="session")
def stub_image(docker_client: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_stub_image(docker_client, tmp_path_factory.mktemp("stub"))
