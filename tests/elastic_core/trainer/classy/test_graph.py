"""A trained model as one file: the same values without its source, for any number of samples."""

from pathlib import Path

import pytest
import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.__main__ import main
from elastic_core.trainer.classy import graph
from elastic_core.trainer.classy.export import load_exported
from elastic_core.trainer.classy.graph import FORMATS, Format, write_graph
from elastic_core.trainer.classy.solo import SoloReducer
from tests.elastic_core.trainer.classy.conftest import make_trainee

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")  # TorchScript is an old format


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    trainee = make_trainee()
    trainee.train_step(SoloReducer())
    return Path(trainee.export(tmp_path_factory.mktemp("export") / "model"))


def test_an_export_tells_the_shape_of_an_input(directory: Path) -> None:
    sample = make_trainee().task.datasets["train"][0]["input"]
    assert load_exported(directory).sample_shape == tuple(sample.shape)


@pytest.mark.parametrize("form", ["torch-export", "torchscript"])
def test_a_file_without_the_source_names_the_same_classes(
    directory: Path, form: Format, tmp_path: Path
) -> None:
    file = write_graph(directory, form, tmp_path / "out" / "model.bin")
    read = torch.jit.load(file) if form == "torchscript" else torch.export.load(file).module()
    images = torch.randn(5, *load_exported(directory).sample_shape)
    with torch.no_grad():
        assert torch.allclose(read(images), load_exported(directory).model(images), atol=1e-6)
    assert [path.name for path in file.parent.iterdir()] == ["model.bin"]


def test_the_command_writes_beside_the_weights(directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", str(directory), "torchscript"]) == 0
    assert capsys.readouterr().out == f"{directory / FORMATS['torchscript']}\n"
    assert (directory / "model.torchscript.pt").exists()


def test_a_model_that_cannot_be_written_so_is_refused_and_leaves_no_file(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Other(torch.nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)[:, :1] * 0 + float(images.shape[0])

    plain = load_exported(directory)
    monkeypatch.setattr(graph, "load_exported", lambda _: type(plain)(**{**_fields(plain), "model": Other()}))
    with pytest.raises(RefusedInput, match="its values differ by 1 from the model's"):
        write_graph(directory, "torchscript", tmp_path / "model.pt")
    assert list(tmp_path.iterdir()) == []


def _fields(exported: object) -> dict[str, object]:
    return {name: getattr(exported, name) for name in ("transform", "classes", "metrics", "sample_shape")}
