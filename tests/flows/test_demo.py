"""The demonstration strikes once, in the middle of an epoch, at the node of rank 0, and tells the acts."""

from pathlib import Path

import pytest

from elastic_core.errors import RefusedInput
from elastic_core.ids import NodeId
from elastic_core.model.job import ClassyTraining, JobSpec, NodeBounds, ScriptTraining
from elastic_core.model.membership import Cause, Generation, Member
from elastic_core.model.progress import HistoryEntry, Progress
from flows import demo
from flows.audience import RunEnd, RunSnapshot
from flows.demo import Act, Story
from tasks.agents import Attempt
from tasks.runs import RunDirectory
from tasks.watch import Observation

EPOCHS, STEPS = 10, 200  # 20 steps an epoch


class View:
    end: RunEnd | None = None

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def __enter__(self) -> "View":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def decided(self, sentence: str) -> None:
        self.sentences.append(sentence)

    def saw(self, snapshot: RunSnapshot) -> None:
        pass

    def ended(self, end: RunEnd) -> None:
        self.end = end


def snapshot(names: list[str], number: int, step: int) -> RunSnapshot:
    generation = Generation(
        number=number,
        cause=Cause.START,
        restart_count=0,
        world_size=len(names),
        group_world_size=len(names),
        master_address="x",
        master_port=1,
    )
    members = tuple(
        Member(node_id=NodeId(f"{name}.a"), address="x", slots=1, group_rank=rank, first_rank=rank)
        for rank, name in enumerate(names)
    )
    seen = Observation(
        current=generation,
        history=(HistoryEntry(generation=generation, members=members),),
        progress=Progress(
            generation=number, epoch=step // 20, step=step, samples=64 * step, total_steps=STEPS
        ),
    )
    attempt = Attempt(job=JobSpec(), directory=RunDirectory(Path("digits-1")), number=1, endpoint="x:1")
    return RunSnapshot(attempt=attempt, began_at=0.0, observation=seen)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    monkeypatch.setattr(demo, "kill_node", lambda job, runs, run, name: names.append(name))
    return names


@pytest.mark.parametrize(
    ("step", "strikes"),
    [(10, False), (39, False), (40, False), (41, True), (50, True), (59, True), (60, False), (61, True)],
)
def test_the_blow_comes_in_mid_epoch_after_a_fifth_of_the_training(
    killed: list[str], step: int, strikes: bool
) -> None:
    Story(View(), Path("runs"), EPOCHS).saw(snapshot(["node-2", "node-1"], 1, step))
    assert killed == (["node-2"] if strikes else [])


def test_nothing_is_struck_before_all_nodes_train(killed: list[str]) -> None:
    Story(View(), Path("runs"), EPOCHS).saw(snapshot(["node-1"], 1, 50))
    assert killed == []


def test_the_acts_follow_each_other_and_the_blow_comes_once(killed: list[str]) -> None:
    view = View()
    story = Story(view, Path("runs"), EPOCHS)
    acts = []
    for names, number, step in (
        (["node-1", "node-2"], 1, 50),
        (["node-1", "node-2"], 1, 50),  # not noticed yet
        (["node-2"], 2, 52),
        (["node-2", "node-3"], 3, 70),
        (["node-2", "node-3"], 3, 90),
    ):
        story.saw(snapshot(names, number, step))
        acts.append(story.act)
    assert acts == [Act.STRUCK, Act.STRUCK, Act.SMALLER, Act.GROWN, Act.GROWN]
    assert killed == ["node-1"]
    assert [sentence.split(",")[0] for sentence in view.sentences] == [
        "SIGKILL to every process of node-1",
        "training goes on with 1 of 2 nodes",
        "a new node joined: 2 nodes again",
    ]


@pytest.mark.parametrize(
    ("job", "problem"),
    [
        (JobSpec(training=ScriptTraining(script="x.py")), "training.kind"),
        (JobSpec(training=ClassyTraining(config={}), nodes=NodeBounds(target=1)), "nodes.target"),
        (JobSpec(training=ClassyTraining(config={}), nodes=NodeBounds(min=2, target=2)), "nodes.min"),
    ],
)
def test_a_job_that_cannot_show_it_is_refused(job: JobSpec, problem: str, tmp_path: Path) -> None:
    with pytest.raises(RefusedInput, match=problem):
        demo.demonstrate(job, runs=tmp_path)
