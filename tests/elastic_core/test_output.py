"""A full disk takes the output and nothing else."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from elastic_core.output import lossy


def test_a_full_disk_is_not_noticed_by_the_writer() -> None:
    with Path("/dev/full").open("w") as full:
        stream = lossy(full)
        for _ in range(3):
            stream.write("a line\n")
        stream.write("more than any buffer holds" * 10_000)
        stream.flush()


def test_what_can_be_written_is_written_at_once_and_in_order(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="utf-8") as file:
        file.write("first ")
        stream = lossy(file)
        stream.write("ü\n")
        assert (tmp_path / "log").read_text() == "first ü\n"
        assert (stream.fileno(), stream.isatty(), stream.name) == (file.fileno(), False, file.name)
        assert stream.encoding == "utf-8"
        del stream
        os.fstat(file.fileno())


def test_a_reader_that_has_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as file:
        lossy(file).write("nobody hears\n")


@pytest.mark.parametrize("stream", [io.StringIO(), io.TextIOWrapper(io.BytesIO())])
def test_what_is_no_file_stays_as_it_is(stream: io.StringIO) -> None:
    assert lossy(stream) is stream
