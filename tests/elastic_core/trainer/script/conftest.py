from __future__ import annotations

import pytest
import torch

from tests.elastic_core.trainer.script.loop import Loop


@pytest.fixture(scope="package")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The weights of the script alone, on a day on which nothing happens."""
    loop = Loop(tmp_path_factory.mktemp("undisturbed"))
    assert loop.finish(loop.start()) == [0], loop.log.read_text()
    assert loop.audit().is_exact
    weights: dict[str, torch.Tensor] = torch.load(loop.directory / "final.pt", weights_only=True)
    return weights
