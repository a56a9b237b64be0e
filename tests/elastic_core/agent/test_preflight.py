"""A node that cannot train says which check failed, its value and the remedy, and ends by itself."""

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from elastic_core.agent import fitness, preflight
from elastic_core.agent.address import interfaces
from elastic_core.agent.preflight import Finding, ask_child, look_at_place, look_at_places
from elastic_core.exits import ExitCode
from elastic_core.store.etcd import EtcdStore
from elastic_core.testing.agents import AgentRun

TALKS = """
import json, sys, time
print(json.dumps({"check": "disk", "told": "fast", "remedy": ""}), flush=True)
time.sleep(600)
"""


class Usage(NamedTuple):
    free: int


def test_a_good_place_is_made_and_left_empty(tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoints"
    (found,) = look_at_places({"checkpoints": str(place)})
    assert (found.check, found.remedy) == ("checkpoints", "")
    assert found.told.startswith(f"{place}: 1 MiB durable in ")
    assert list(place.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named_with_value_and_remedy(tmp_path: Path) -> None:
    place = tmp_path / "file" / "checkpoints"
    place.parent.write_text("")
    (found,) = look_at_places({"checkpoints": str(place)})
    assert found.sentence() == (
        f"pre-flight check 'checkpoints': {place} cannot be written: Not a directory; "
        "correct its permissions or mount, make room, or name another directory"
    )


def test_too_little_room_and_a_write_that_does_not_show_are_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(free=preflight.LEAST_FREE - 1))
    assert look_at_place("disk", tmp_path).remedy == "make room: at least 64 MiB must be free"
    monkeypatch.setattr(os, "listdir", lambda _: [])
    assert look_at_place("disk", tmp_path).told == f"{tmp_path} does not show what was just written there"


def test_a_look_that_hangs_is_given_up_and_named(tmp_path: Path) -> None:
    command = [sys.executable, "-c", TALKS]
    found = ask_child(command, patience_s=0.5, checks=("disk", "checkpoints"), remedy="see its mount")
    assert found == [
        Finding("disk", "fast"),
        Finding("checkpoints", "no answer within 0.5 s", "see its mount"),
    ]


def test_a_look_that_dies_says_why() -> None:
    command = [sys.executable, "-c", "raise SystemExit('no such mount')"]
    (found,) = ask_child(command, patience_s=20, checks=("disk",), remedy="see its mount")
    assert found == Finding("disk", "no such mount", "see its mount")


def test_a_processor_that_computes_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fitness.look_at_computing().remedy == ""
    right = torch.Tensor.__matmul__

    def wrong(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        product = right(one, other)
        if product.is_floating_point():
            product[7, 7] += 1
        return product

    monkeypatch.setattr(torch.Tensor, "__matmul__", wrong)
    found = fitness.look_at_computing()
    assert found.told == "1 of 65536 entries of a matrix product are wrong"
    assert found.remedy.startswith("take this machine out of service")


def test_an_agent_whose_checkpoints_cannot_be_written_ends_before_it_registers(
    store: EtcdStore, etcd_endpoint: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    with AgentRun(store, etcd_endpoint, f"unfit-{os.getpid()}", tmp_path) as run:
        agent = run.start("a", f"--run-dir={tmp_path}/file/run", "--no-python", "true")
        assert agent.wait() == ExitCode.UNFIT
        assert "pre-flight check 'disk': " in agent.last_lines()[0]
        assert "cannot be written: Not a directory" in agent.last_lines()[0]
        assert "registered" not in agent.output()
        assert store.read_prefix(run.keys.prefix).entries == ()


@pytest.mark.case("R16")
@pytest.mark.slow
@pytest.mark.parametrize("names", ["nosuch0", "^lo,docker"])
def test_an_agent_whose_interface_is_not_there_ends_before_a_worker_starts(
    store: EtcdStore, etcd_endpoint: str, tmp_path: Path, names: str
) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('worker started')")
    nowhere = {"GLOO_SOCKET_IFNAME": names}
    with AgentRun(store, etcd_endpoint, f"unfit-{os.getpid()}-{len(names)}", tmp_path) as run:
        agent = run.start("a", str(script), environment=nowhere)
        assert agent.wait() == ExitCode.UNFIT
        unknown, known = names.split(",")[0], ", ".join(interfaces())
        assert agent.last_lines()[0].endswith(
            f"pre-flight check 'interface': GLOO_SOCKET_IFNAME is {names!r}; "
            f"{unknown!r} is not here, and gloo takes names, no patterns: {known}"
        )
        assert "worker started" not in agent.output()
        careless = run.start("b", "--preflight=off", str(script), environment=nowhere)
        assert careless.wait() == 0
        assert "worker started" in careless.output()
