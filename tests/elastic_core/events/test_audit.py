import json
import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_core.events.audit import EpochAudit, SampleAudit, fold_audit
from elastic_core.events.lines import parse_lines

Line = dict[str, Any]


def start(g: int, step: int, a: int = 1) -> Line:
    return {"g": g, "a": a, "from": step, "source": "memory"}


def prepare(g: int, step: int, *ids: int, e: int = 0, a: int = 1) -> Line:
    return {"g": g, "a": a, "e": e, "s": step, "ids": list(ids)}


def commit(g: int, step: int, a: int = 1) -> Line:
    return {"g": g, "a": a, "c": step}


def test_two_workers_that_share_an_epoch_train_each_sample_once() -> None:
    first = [start(1, 0), prepare(1, 0, 0, 1), commit(1, 0), prepare(1, 1, 4), commit(1, 1)]
    second = [start(1, 0), prepare(1, 0, 2, 3), commit(1, 0), prepare(1, 1, 5), commit(1, 1)]
    audit = fold_audit([first, second], dataset=6, is_finished=True)
    assert audit == SampleAudit(
        dataset=6, steps=2, epochs=(EpochAudit(epoch=0, samples=6, is_complete=True),)
    )
    assert audit.is_exact


def test_a_step_that_one_rank_committed_counts_with_the_samples_of_all() -> None:
    dead = [start(1, 0), prepare(1, 0, 0, 1)]
    survivor = [start(1, 0), prepare(1, 0, 2, 3), commit(1, 0), start(2, 1)]
    audit = fold_audit([dead, survivor], dataset=4, is_finished=True)
    assert (audit.missed, audit.repeated, audit.steps_lost) == (0, 0, 0)


def test_a_step_that_nobody_committed_is_no_loss_when_it_is_done_by_the_next_generation() -> None:
    dead = [start(1, 0), prepare(1, 0, 0, 1)]
    survivor = [start(1, 0), prepare(1, 0, 2, 3), start(2, 0), prepare(2, 0, 0, 1, 2, 3), commit(2, 0)]
    audit = fold_audit([dead, survivor], dataset=4, is_finished=True)
    assert (audit.steps, audit.missed, audit.repeated, audit.steps_lost) == (1, 0, 0, 0)


def test_steps_that_a_generation_goes_back_behind_are_lost_and_count_once() -> None:
    worker = [start(1, 0)]
    for step in range(3):
        worker += [prepare(1, step, step), commit(1, step)]
    worker += [start(2, 1)]
    for step in range(1, 4):
        worker += [prepare(2, step, step), commit(2, step)]
    audit = fold_audit([worker], dataset=4, is_finished=True)
    assert (audit.steps, audit.missed, audit.repeated) == (4, 0, 0)
    assert audit.undone == {(1, 2): 2}
    assert audit.steps_lost == 2


def test_steps_beyond_the_checkpoint_that_a_stopped_run_went_back_to_are_not_in_the_model() -> None:
    before = [start(1, 0), prepare(1, 0, 0), commit(1, 0), prepare(1, 1, 1), commit(1, 1)]
    after = [start(1, 1, a=2)]
    audit = fold_audit([before, after], dataset=4, is_finished=False)
    assert (audit.steps, audit.steps_lost) == (1, 1)


def test_what_a_fenced_generation_goes_on_to_commit_does_not_count() -> None:
    fenced = [start(1, 0), *(line for s in range(5) for line in (prepare(1, s, s), commit(1, s)))]
    current = [start(2, 2), *(line for s in (2, 3) for line in (prepare(2, s, s), commit(2, s)))]
    audit = fold_audit([fenced, current], dataset=4, is_finished=True)
    assert (audit.steps, audit.missed, audit.repeated, audit.steps_lost) == (4, 0, 0, 3)


def test_a_later_attempt_counts_its_generations_anew_and_is_still_the_newer() -> None:
    first = [start(7, 0), prepare(7, 0, 0), commit(7, 0), prepare(7, 1, 1), commit(7, 1)]
    second = [start(1, 1, a=2), prepare(1, 1, 1, a=2), commit(1, 1, a=2)]
    audit = fold_audit([second, first], dataset=2, is_finished=True)
    assert (audit.steps, audit.repeated, audit.undone) == (2, 0, {(2, 1): 1})


def test_missed_and_repeated_ids_are_counted_and_named() -> None:
    lines = [start(1, 0), prepare(1, 0, 0, 1, 1, 3, 3, 3), commit(1, 0), prepare(1, 1, 5, e=1), commit(1, 1)]
    audit = fold_audit([lines], dataset=5, is_finished=False)
    assert audit.epochs[0] == EpochAudit(
        epoch=0,
        samples=6,
        is_complete=True,
        missed=2,
        repeated=3,
        missed_examples=(2, 4),
        repeated_examples=(1, 3),
    )
    assert audit.epochs[1].foreign == 1
    assert not audit.is_exact
    assert audit.sentence() == "2 missed, 3 repeated (epoch 1: 2, 4), 1 unknown to the dataset in 2 epochs"


def test_nothing_is_missed_of_an_epoch_that_is_not_over() -> None:
    audit = fold_audit([[start(1, 0), prepare(1, 0, 3), commit(1, 0)]], dataset=9, is_finished=False)
    assert (audit.missed, audit.is_exact) == (0, True)
    assert audit.sentence() == "no sample id was used twice in 1 sample of an unfinished epoch"


def test_a_step_without_a_record_is_told() -> None:
    lines = [start(1, 0), prepare(1, 0, 0), commit(1, 0), commit(1, 1), prepare(1, 4, 1), commit(1, 4)]
    audit = fold_audit([lines], dataset=2, is_finished=True)
    assert (audit.unrecorded, audit.unrecorded_examples) == (3, (1, 2, 3))
    assert not audit.is_exact


def test_a_record_that_begins_in_mid_training_says_nothing_of_the_epoch_before() -> None:
    lines = [start(3, 7), prepare(3, 7, 2), commit(3, 7), prepare(3, 8, 0, 1, 2, e=1), commit(3, 8)]
    audit = fold_audit([lines], dataset=3, is_finished=True)
    assert [epoch.is_complete for epoch in audit.epochs] == [False, True]
    assert audit.is_exact


def test_lines_of_unknown_form_are_passed_over() -> None:
    strange: list[Line] = [
        {},
        {"g": "1", "a": 1, "c": 0},
        {"g": 1, "a": 1, "c": True},
        {"g": 1, "a": 1, "e": 0, "s": 0, "ids": "all"},
        {"g": 1, "a": 1, "e": 0, "s": 0, "ids": [0, None, 1e99, 10**40, 1]},
        {"g": 1, "a": 1, "what": 3},
        commit(1, 0),
    ]
    audit = fold_audit([strange], dataset=2, is_finished=True)
    assert (audit.steps, audit.is_exact) == (1, True)


def test_the_sentence_says_how_many_ids_were_used_once_in_how_many_epochs() -> None:
    epochs = tuple(EpochAudit(epoch=e, samples=1437, is_complete=True) for e in range(10))
    audit = SampleAudit(dataset=1437, epochs=epochs)
    said = "every one of 1437 sample ids was used exactly once in each of 10 epochs (0 missed, 0 repeated)"
    assert audit.sentence() == said
    stopped = SampleAudit(
        dataset=1437, epochs=(*epochs, EpochAudit(epoch=10, samples=640, is_complete=False))
    )
    assert stopped.sentence() == f"{said}; epoch 11 stopped at 640 samples"


def test_without_lines_there_is_nothing_to_say() -> None:
    assert fold_audit([], dataset=10, is_finished=True) == SampleAudit(dataset=10)


# ---- against a training that is simulated step by step --------------------------------------


@dataclass
class DumbRun:
    """Trains by hand: the model is the list of batches that it has seen."""

    chance: random.Random
    dataset: int
    batch: int
    epochs: int
    model: list[tuple[int, list[int]]] = field(default_factory=list)
    files: dict[str, list[Line]] = field(default_factory=dict)
    committed: set[int] = field(default_factory=set)
    lost: int = 0
    workers: int = 0

    def train(self) -> None:
        attempt, generation = 1, 0
        while len(self.model) < self.total_steps:
            generation += 1
            if self.chance.random() < 0.2:
                attempt, generation = attempt + 1, 1
            back = self.chance.choice([0, 0, 0, 1, 3]) if generation > 1 or attempt > 1 else 0
            self.live(attempt, generation, max(0, len(self.model) - back))

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.dataset // self.batch)

    @property
    def total_steps(self) -> int:
        return self.epochs * self.steps_per_epoch

    def live(self, attempt: int, generation: int, origin: int) -> None:
        """One generation: it goes back to `origin`, does some steps and breaks in the middle of one."""
        self.lost += len(self.model) - origin
        del self.model[origin:]
        names = [f"{(self.workers + rank) % 5}" for rank in range(self.chance.randint(1, 3))]
        self.workers += self.chance.randint(0, 2)
        for name in names:
            self.files.setdefault(name, []).append(start(generation, origin, attempt))
        for _ in range(self.chance.randint(0, 6)):
            if len(self.model) == self.total_steps or not self.step(attempt, generation, names):
                return

    def step(self, attempt: int, generation: int, names: list[str]) -> bool:
        number = len(self.model)
        epoch, within = divmod(number, self.steps_per_epoch)
        order = random.Random(epoch).sample(range(self.dataset), self.dataset)
        batch = order[within * self.batch :][: self.batch]
        if self.chance.random() < 0.05:  # a bug of the order: something else is trained
            batch = [self.chance.randrange(self.dataset) for _ in batch]
        for rank, name in enumerate(names):
            mine = batch[rank :: len(names)]
            self.files[name].append(prepare(generation, number, *mine, e=epoch, a=attempt))
        is_broken = self.chance.random() < 0.2
        who = self.chance.sample(names, self.chance.randint(0, len(names))) if is_broken else names
        for name in who:
            self.files[name].append(commit(generation, number, attempt))
        if who:
            self.model.append((epoch, batch))
        return not is_broken

    def uses(self, epoch: int) -> Counter[int]:
        return Counter(index for e, batch in self.model if e == epoch for index in batch)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), dataset=st.integers(1, 12), batch=st.integers(1, 5))
def test_the_fold_finds_what_a_simulated_training_has_seen(seed: int, dataset: int, batch: int) -> None:
    run = DumbRun(random.Random(seed), dataset, batch, epochs=3)
    run.train()
    files = list(run.files.values())
    random.Random(seed).shuffle(files)
    audit = fold_audit(files, dataset=dataset, is_finished=True)
    assert audit.steps == run.total_steps
    assert audit.steps_lost == run.lost
    assert audit.unrecorded == 0
    for epoch in audit.epochs:
        uses = run.uses(epoch.epoch)
        assert epoch.missed == sum(index not in uses for index in range(dataset))
        assert epoch.repeated == sum(count - 1 for count in uses.values())
    assert len(audit.epochs) == 3


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("gaescid"), inner, max_size=3)
    ),
    max_leaves=6,
)
any_line = st.dictionaries(
    st.sampled_from(["g", "a", "e", "s", "c", "ids", "from"]), json_values | st.integers(0, 3), max_size=7
)


@settings(max_examples=60, deadline=None)
@given(files=st.lists(st.lists(any_line, max_size=8), max_size=3), is_finished=st.booleans())
def test_no_line_breaks_the_fold(files: list[list[Line]], is_finished: bool) -> None:
    audit = fold_audit(files, dataset=3, is_finished=is_finished)
    assert audit.steps_lost >= 0
    assert audit.sentence()


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_worker_killed_in_the_middle_of_a_line_loses_that_line_only(cut: int) -> None:
    dead = [start(1, 0), prepare(1, 0, 0, 1), commit(1, 0), prepare(1, 1, 4, 5)]
    text = "\n".join(json.dumps(line) for line in dead)[:-cut]
    survivor = [start(1, 0), prepare(1, 0, 2, 3), commit(1, 0), prepare(1, 1, 6, 7), start(2, 1)]
    survivor += [prepare(2, 1, 4, 5, 6, 7), commit(2, 1)]
    audit = fold_audit([parse_lines(text.splitlines()), survivor], dataset=8, is_finished=True)
    assert (audit.steps, audit.is_exact, audit.steps_lost) == (2, True, 0)
