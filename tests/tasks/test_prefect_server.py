"""One server a home: started once, found again, stopped for good."""

from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from tasks import prefect_server
from tasks.process import wait_ended


def test_a_record_whose_process_is_gone_is_no_server(tmp_path: Path) -> None:
    (tmp_path / "prefect-server.json").write_text(
        '{"process": {"pid": 1, "start_ticks": 1, "boot": "another"}, "port": 4200}'
    )
    assert prefect_server.status(tmp_path) is None
    assert prefect_server.stop(tmp_path) is None


def test_a_port_that_needs_root_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match="--port: 80 is not allowed; choose 1024 to 65535"):
        prefect_server.begin(tmp_path, port=80)


@pytest.mark.slow
def test_a_server_is_started_once_found_again_and_stopped(tmp_path: Path) -> None:
    started = prefect_server.begin(tmp_path)
    try:
        prefect_server.wait_healthy(started, tmp_path)
        assert prefect_server.begin(tmp_path) == started
        assert prefect_server.status(tmp_path) == started
        with pytest.raises(RefusedInput, match=f"runs on port {started.port} already"):
            prefect_server.begin(tmp_path, port=started.port + 1)
    finally:
        assert prefect_server.stop(tmp_path) == started
    assert wait_ended([started.process], 0) == set()
    assert prefect_server.status(tmp_path) is None
