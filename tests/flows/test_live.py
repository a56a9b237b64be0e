"""What a terminal and a log see of a run."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from elastic_core.cluster.provider import Instance, InstanceState
from elastic_core.ids import LeaseId, NodeId
from elastic_core.model.job import JobSpec
from elastic_core.model.membership import Cause, Generation, Member, Outcome
from elastic_core.model.node import NodePhase, NodeRecord
from elastic_core.model.progress import HistoryEntry, Progress, Resumption
from flows.audience import RunEnd, RunSnapshot
from flows.live import PlainView, TerminalView, progress_line, spent_so_far
from tasks.agents import Attempt
from tasks.runs import RunDirectory
from tasks.watch import Observation

GENERATION = Generation(
    number=1,
    cause=Cause.START,
    restart_count=0,
    world_size=1,
    group_world_size=1,
    master_address="127.0.0.1",
    master_port=20000,
    reason="1 node is ready",
)
ENTRY = HistoryEntry(
    generation=GENERATION,
    members=(Member(node_id=NodeId("node-1.a"), address="x", slots=1, group_rank=0, first_rank=0),),
    published_at=104.0,
)
RESUMED = Resumption(
    generation=1,
    last_step_at=0,
    noticed_at=0,
    assigned_at=104.5,
    formed_at=105.0,
    synced_at=105.5,
    first_step_at=106.0,
    step_before=-1,
    step_resumed=0,
    source="fresh",
)


def record(name: str, phase: NodePhase) -> NodeRecord:
    return NodeRecord(
        node_id=NodeId(name),
        address="127.0.0.1",
        probe_port=1,
        probe_token="t",
        master_port=2,
        slots=1,
        lease=LeaseId(1),
        phase=phase,
    )


def progress(step: int, phase: str = "train", epoch: int = 2) -> Progress:
    return Progress(
        generation=1,
        epoch=epoch,
        step=step,
        samples=64 * step,
        total_steps=184,
        phase=phase,
        metrics={"loss": 0.43217, "images_per_s": 1234.4},
    )


def snapshot(directory: Path, told: Progress | None) -> RunSnapshot:
    run = RunDirectory(directory / "digits-1")
    run.path.mkdir(exist_ok=True)
    (run.path / "marks.json").write_text('{"started_at": 100.0, "asked_at": 101.0, "granted_at": 101.0}')
    seen = Observation(
        nodes=(record("node-1.a", NodePhase.READY), record("node-2.b", NodePhase.WARMING)),
        current=GENERATION,
        history=(ENTRY,),
        resumptions=(RESUMED,),
        progress=told,
    )
    attempt = Attempt(job=JobSpec(), directory=run, number=1, endpoint="127.0.0.1:1")
    return RunSnapshot(attempt=attempt, began_at=100.0, observation=seen)


def test_the_line_tells_epoch_step_loss_speed_and_nodes(tmp_path: Path) -> None:
    assert progress_line(snapshot(tmp_path, progress(60))) == (
        "epoch 3  step 60/184  loss 0.4322  images/s 1234  nodes 1 training (1 warming)"
    )


def test_a_finished_training_has_no_epoch_beyond_its_last(tmp_path: Path) -> None:
    line = progress_line(snapshot(tmp_path, progress(184, phase="done", epoch=8)))
    assert line.startswith("epoch 8  step 184/184  phase done")


def test_the_epoch_that_is_evaluated_is_the_one_that_ended(tmp_path: Path) -> None:
    line = progress_line(snapshot(tmp_path, progress(69, phase="evaluate", epoch=3)))
    assert line.startswith("epoch 3  step 69/184  phase evaluate")


def test_a_node_that_left_the_rendezvous_is_not_starting(tmp_path: Path) -> None:
    told = snapshot(tmp_path, progress(60))
    running = [Instance(name=f"node-{number}", state=InstanceState.RUNNING) for number in (1, 2, 3)]
    seen = replace(told.observation, nodes=(), instances=tuple(running))
    assert progress_line(replace(told, observation=seen)).endswith("nodes 1 training (2 starting)")


def test_nodes_of_a_finished_training_are_done(tmp_path: Path) -> None:
    assert progress_line(snapshot(tmp_path, progress(184, phase="done", epoch=8))).endswith("nodes 1 done")


def test_there_is_no_line_before_the_first_step(tmp_path: Path) -> None:
    assert progress_line(snapshot(tmp_path, None)) == ""


def test_the_live_ledger_sums_up_to_the_time_so_far(tmp_path: Path) -> None:
    spent = spent_so_far(snapshot(tmp_path, progress(60)), now=126.0)
    assert spent == {"provision": 4.0, "rendezvous": 0.5, "restart": 1.0, "train": 20.5}


def test_plain_lines_are_printed_once_a_second_at_most(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with PlainView() as view:
        view.decided("generation 1: 1 node is ready [of 2]")
        for step in range(1, 50):
            view.saw(snapshot(tmp_path, progress(step)))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" s  ")[1].split("  ")[0] for line in lines] == [
        "generation 1: 1 node is ready [of 2]",
        "epoch 3",
    ]


def test_the_panel_shows_run_progress_and_ledger_and_keeps_the_end(tmp_path: Path) -> None:
    out = io.StringIO()
    end = RunEnd(run=snapshot(tmp_path, None).attempt.directory.run, outcome=Outcome.SUCCEEDED, exit_code=0,
                 reason="done", report=tmp_path)  # fmt: skip
    view = TerminalView(Console(file=out, force_terminal=True, width=120))
    with view:
        view.decided("generation 1: 1 node is ready [of 2]")
        view.saw(snapshot(tmp_path, None))
        view.saw(snapshot(tmp_path, progress(60)))
        view.ended(end)
    shown = out.getvalue()
    for text in ("generation 1: 1 node is ready [of 2]", "digits-1", "60/184", "0.4322", "provision 4.0 s"):
        assert text in shown
    assert view.end == end
