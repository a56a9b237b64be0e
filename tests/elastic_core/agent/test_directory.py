"""The private directory has room for a socket, wherever temporary files lie."""

import tempfile
from pathlib import Path

import pytest

from elastic_core.agent.channel import MAX_PATH
from elastic_core.agent.directory import PREFIX, PrivateDirectory


@pytest.mark.parametrize(("length", "is_used"), [(40, True), (73, True), (74, False), (200, False)])
def test_a_temporary_directory_that_is_too_deep_for_a_socket_is_not_used(
    monkeypatch: pytest.MonkeyPatch, length: int, *, is_used: bool
) -> None:
    with tempfile.TemporaryDirectory(prefix="et-", dir="/tmp") as short:
        parent = Path(short, "d" * (length - len(short) - 1))
        parent.mkdir()
        assert len(str(parent)) == length
        monkeypatch.setattr(tempfile, "tempdir", str(parent))
        directory = PrivateDirectory()
        try:
            assert (directory.path.parent == parent) is is_used
            assert directory.path.name.startswith(PREFIX)
            assert len(str(directory.path / "agent.sock")) <= MAX_PATH
        finally:
            directory.remove()
