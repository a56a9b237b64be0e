"""A kill for want of memory is told from any other, under both versions of control groups."""

from pathlib import Path

import pytest

from elastic_core.agent.kernel_kills import KernelKills

V1 = ("memory/memory.oom_control", "memory/memory.limit_in_bytes", str(2**63 - 4096))
V2 = ("memory.events", "memory.max", "max")


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(("events", "limit", "endless"), [V1, V2], ids=["v1", "v2"])
def test_a_kill_is_blamed_on_memory_once_and_with_the_limit(
    tmp_path: Path, events: str, limit: str, endless: str
) -> None:
    write(tmp_path, events, "oom 3\nunder_oom 0\noom_kill 2\n")
    write(tmp_path, limit, f"{64 << 20}\n")
    subject = KernelKills(tmp_path)
    assert subject.blame() == ""
    write(tmp_path, events, "oom 4\nunder_oom 0\noom_kill 3\n")
    assert subject.blame() == "out of memory, limit 64 MiB"
    assert subject.blame() == ""
    write(tmp_path, limit, f"{endless}\n")
    write(tmp_path, events, "oom_kill 4\n")
    assert subject.blame() == "out of memory"


def test_without_control_groups_nothing_is_blamed(tmp_path: Path) -> None:
    assert KernelKills(tmp_path).blame() == ""
