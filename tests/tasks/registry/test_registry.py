"""The contract of a registry, over directories and over MLflow."""

from __future__ import annotations

import multiprocessing
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.quality.data import DataPrint
from tasks.registry.choice import DirectoryChoice, MlflowChoice, chosen, open_registry
from tasks.registry.directory import DirectoryRegistry
from tasks.registry.protocol import History, Lineage, Registry, RegistryFailed

Open = Callable[[], Registry]


def lineage(run: str) -> Lineage:
    return Lineage(
        job="digits",
        run=run,
        data=DataPrint(digest="d", files=2, folders={"cat": 2}),
        recipe="r",
        metrics={"accuracy": 0.5},
        is_accepted=True,
        reasons=("the first champion",),
        created_at=1.0,
    )


@pytest.fixture(scope="module")
def mlflow_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An empty database of MLflow's, made once: its tables take seconds."""
    mlflow = pytest.importorskip("mlflow", reason="the extra mlflow is not installed")
    database = tmp_path_factory.mktemp("mlflow") / "empty.db"
    mlflow.MlflowClient(tracking_uri=f"sqlite:///{database}").search_experiments()
    return database


@pytest.fixture(params=["directory", pytest.param("mlflow", marks=pytest.mark.slow)])
def opened(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    """Return a function that opens the same registry anew, as another process would."""
    if request.param == "directory":
        return lambda: open_registry(DirectoryChoice(path=str(tmp_path / "models")), "digits", tmp_path)
    shutil.copyfile(request.getfixturevalue("mlflow_database"), tmp_path / "mlflow.db")
    monkeypatch.chdir(tmp_path)  # where MLflow without a server puts files
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    return lambda: open_registry(MlflowChoice(uri=uri), "digits", tmp_path / "home")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "trained"
    directory.mkdir()
    (directory / "model.pt").write_bytes(b"weights")
    (directory / "config.json").write_text("{}")
    return directory


@pytest.mark.filterwarnings("default")  # MLflow's own
def test_a_version_keeps_files_and_lineage_and_is_no_champion_by_itself(opened: Open, model: Path) -> None:
    assert (opened().versions(), opened().champion()) == ([], None)
    registered = opened().register(model, lineage("digits-1"))
    (version,) = opened().versions()
    assert (version, version.number) == (registered, 1)
    assert version.lineage == lineage("digits-1")
    assert (opened().fetch(1) / "model.pt").read_bytes() == b"weights"
    assert opened().champion() is None


@pytest.mark.filterwarnings("default")
def test_promotions_move_one_pointer_and_roll_back_in_their_order(opened: Open, model: Path) -> None:
    registry = opened()
    assert [registry.register(model, lineage(f"digits-{n}")).number for n in (1, 2, 3)] == [1, 2, 3]
    registry.promote(1)
    registry.promote(3)
    registry.promote(3)  # said twice is said once
    assert opened().champion() == 3
    assert opened().rollback() == 1
    assert opened().champion() == 1
    with pytest.raises(RefusedInput, match="no champion before this one"):
        opened().rollback()
    assert opened().champion() == 1


@pytest.mark.filterwarnings("default")
def test_a_run_is_registered_once_however_often_it_is_handed_in(opened: Open, model: Path) -> None:
    first = opened().register(model, lineage("digits-1"))
    assert opened().register(model, lineage("digits-1")) == first
    assert [version.number for version in opened().versions()] == [1]


@pytest.mark.filterwarnings("default")
def test_a_version_that_is_not_there_is_refused_with_those_that_are(opened: Open, model: Path) -> None:
    registry = opened()
    registry.register(model, lineage("digits-1"))
    for refused in (registry.promote, registry.fetch):
        with pytest.raises(RefusedInput, match="no version 7; versions: 1"):
            refused(7)
    assert registry.champion() is None


# ---- directories alone -----------------------------------------------------------------------


def test_the_champions_files_are_found_under_one_path(tmp_path: Path, model: Path) -> None:
    registry = DirectoryRegistry(tmp_path, "digits")
    registry.promote(registry.register(model, lineage("digits-1")).number)
    assert (tmp_path / "digits" / "champion" / "model.pt").read_bytes() == b"weights"


def test_a_promotion_that_was_cut_off_did_not_happen(tmp_path: Path, model: Path) -> None:
    registry = DirectoryRegistry(tmp_path, "digits")
    for number in (1, 2, 3):
        registry.register(model, lineage(f"digits-{number}"))
    registry.promote(1)
    registry.promote(2)
    (tmp_path / "digits" / "promotions").write_text("1,2,3\n")  # died before the link moved
    assert registry.champion() == 2
    assert registry.rollback() == 1


def test_what_a_killed_registration_left_is_no_version(tmp_path: Path, model: Path) -> None:
    registry = DirectoryRegistry(tmp_path, "digits")
    (tmp_path / "digits" / ".draft").mkdir(parents=True)
    (tmp_path / "digits" / ".draft" / "stale").touch()
    version = registry.register(model, lineage("digits-1"))
    assert version.number == 1
    assert not (registry.fetch(1) / "stale").exists()


def _register(root: str, files: str, run: str) -> None:
    DirectoryRegistry(Path(root), "digits").register(Path(files), lineage(run))


def test_writers_at_the_same_time_get_numbers_of_their_own(tmp_path: Path, model: Path) -> None:
    context = multiprocessing.get_context("fork")
    arguments = [(str(tmp_path), str(model), f"digits-{number}") for number in range(6)]
    writers = [context.Process(target=_register, args=each) for each in arguments]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(30)
    versions = DirectoryRegistry(tmp_path, "digits").versions()
    assert [version.number for version in versions] == [1, 2, 3, 4, 5, 6]
    assert {version.lineage.run for version in versions} == {each[2] for each in arguments}


def test_a_full_or_foreign_directory_is_told_with_its_path(tmp_path: Path, model: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(RegistryFailed, match="models"):
        DirectoryRegistry(tmp_path / "models", "digits").register(model, lineage("digits-1"))


def test_the_history_counts_only_as_far_as_the_pointer_confirms_it() -> None:
    assert History((1, 2, 3), 2).numbers == (1, 2)
    assert History((1, 2), None).numbers == ()
    assert History((1, 2, 1), 1).rolled_back("digits") == (1, 2)


def test_an_address_means_mlflow_and_all_else_a_directory() -> None:
    assert chosen("https://mlflow.example") == MlflowChoice(uri="https://mlflow.example")
    assert chosen("/mnt/models") == DirectoryChoice(path="/mnt/models")


def test_mlflow_without_its_client_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mlflow", None)
    with pytest.raises(RefusedInput, match=r"pip install 'elastic-train\[mlflow\]'"):
        open_registry(MlflowChoice(uri="http://127.0.0.1:1"), "digits", tmp_path)
