from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from elastic_core.errors import RefusedInput
from elastic_core.trainer.classy.recipe import Recipe
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.trainee import ClassyTrainee
from tests.elastic_core.trainer.classy.conftest import (
    largest_difference,
    make_trainee,
    small_config,
    snapshot,
)
from tests.elastic_core.trainer.classy.fake_world import FakeWorld, PeerLost

ALONE = SoloReducer()
ROUNDING = 2e-5
"""Sums in another order differ so much after a few steps where BatchNorm sees only eight values."""


def train(
    size: int, config: dict[str, Any] | None = None, steps: int = 6, **options: Any
) -> list[ClassyTrainee]:
    """Train `steps` steps on `size` ranks and return their trainees, by rank."""
    ranks = [make_trainee(config, **options) for _ in range(size)]

    def work(reducer: Any) -> None:
        for _ in range(steps):
            ranks[reducer.rank].train_step(reducer)

    FakeWorld(size).run(work)
    return ranks


class _Noting:
    """A transform that counts the samples it sees."""

    def __init__(self, seen: list[int]) -> None:
        self._seen = seen

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        self._seen.append(sample["target"])
        return sample


def dropout_config(**changes: Any) -> dict[str, Any]:
    """Return a config with every kind of chance: augmentation of samples and dropout in the model."""
    config = small_config(**changes)
    flip = {"name": "RandomHorizontalFlip", "p": 0.5}
    config["dataset"]["train"]["transforms"] = [
        {
            "name": "apply_transform_to_key",
            "key": "input",
            "transforms": [flip, {"name": "RandomErasing", "p": 1.0}],
        }
    ]
    config["model"] = {
        "name": "mlp",
        "input_dim": 768,
        "output_dim": 10,
        "hidden_dims": [16],
        "dropout": 0.5,
        "use_batchnorm": True,
    }
    return config


@pytest.mark.parametrize("size", [2, 3, 4])
def test_weights_do_not_depend_on_the_world_size(size: int) -> None:
    (alone,) = train(1)
    for rank in train(size):
        assert largest_difference(snapshot(rank), snapshot(alone)) < 1e-6


@pytest.mark.parametrize("size", [2, 3])
def test_batchnorm_statistics_do_not_depend_on_the_world_size(size: int) -> None:
    (alone,) = train(1, steps=3)
    ranks = train(size, steps=3)
    for name, buffer in alone.buffers().items():
        assert (ranks[0].buffers()[name] - buffer).abs().max() < 2e-7, name
    counts = [buffer for name, buffer in alone.buffers().items() if name.endswith("num_batches_tracked")]
    assert [count.item() for count in counts] == [3] * len(counts)


@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_hold_bitwise_the_same_state_after_each_step(size: int) -> None:
    first, *others = train(size)
    for other in others:
        assert largest_difference(snapshot(first), snapshot(other)) == 0


@pytest.mark.parametrize("size", [2, 3, 4])
def test_deterministic_mode_is_bitwise_equal_at_any_world_size(size: int) -> None:
    (alone,) = train(1, dropout_config(), deterministic=True)
    for rank in train(size, dropout_config(), deterministic=True):
        assert largest_difference(snapshot(rank), snapshot(alone)) == 0


@pytest.mark.parametrize("size", [2, 3])
def test_augmentation_and_dropout_do_not_depend_on_the_world_size(size: int) -> None:
    (alone,) = train(1, dropout_config())
    assert largest_difference(snapshot(train(size, dropout_config())[0]), snapshot(alone)) < ROUNDING


def test_the_seed_decides_order_weights_and_chance() -> None:
    (one,), (same,), (other,) = (train(1, dropout_config(), seed=seed) for seed in (5, 5, 6))
    assert largest_difference(snapshot(one), snapshot(same)) == 0
    assert largest_difference(snapshot(one), snapshot(other)) > 1e-3


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_sample_is_trained_once_an_epoch(size: int) -> None:
    ranks = [make_trainee() for _ in range(size)]
    seen: list[tuple[int, int]] = []

    def work(reducer: Any) -> None:
        trainee = ranks[reducer.rank]
        while trainee.step < trainee.total_steps:
            seen.extend((trainee.epoch, index) for index in trainee.sample_ids(reducer))
            trainee.train_step(reducer)

    FakeWorld(size).run(work)
    assert Counter(seen) == Counter((epoch, index) for epoch in range(2) for index in range(74))


def test_a_short_last_batch_with_empty_shards_equals_a_plain_step_over_its_samples() -> None:
    config = small_config()
    config["dataset"]["train"]["num_samples"] = 34  # steps of 32 and 2: two of the four shards are empty
    (alone,) = train(1, config, steps=2)
    ranks = train(4, config, steps=2)
    assert largest_difference(snapshot(ranks[3]), snapshot(alone)) < 1e-6


def test_a_step_equals_plain_pytorch_over_the_whole_batch() -> None:
    config = small_config(optimizer={"name": "sgd", "lr": 0.1, "param_schedulers": {}})
    config["model"] = {"name": "mlp", "input_dim": 768, "output_dim": 10, "hidden_dims": [16]}
    trainee, reference = make_trainee(config), make_trainee(config)
    dataset, model = reference.task.datasets["train"], reference.task.base_model
    samples = [dataset[index] for index in reference.sample_ids(ALONE)]
    images = torch.stack([sample["input"] for sample in samples])
    labels = torch.tensor([sample["target"] for sample in samples])
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    model.zero_grad()  # the dry step left some
    loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()

    report = trainee.train_step(ALONE)

    assert report.metrics["loss"] == pytest.approx(loss.item(), abs=1e-6)
    assert report.samples == 32
    assert report.metrics["lr"] == 0.1
    assert largest_difference(dict(trainee.task.base_model.state_dict()), dict(model.state_dict())) < 1e-6


def test_a_broken_collective_changes_nothing() -> None:
    ranks = [make_trainee() for _ in range(2)]
    before = snapshot(ranks[0])

    def work(reducer: Any) -> None:
        with pytest.raises(PeerLost):
            ranks[reducer.rank].train_step(reducer)

    FakeWorld(2, breaks_at=0).run(work)
    for rank in ranks:
        assert rank.step == 0
        assert largest_difference(snapshot(rank), before) == 0


def test_set_up_leaves_the_state_as_a_first_start_has_it() -> None:
    trainee = make_trainee()
    state = trainee.state_dict()
    assert state["step"] == 0
    assert state["optimizer"] == {}
    fresh = ClassyTrainee(trainee.recipe)
    for name, tensor in fresh.task.base_model.state_dict().items():
        assert torch.equal(state["model"][name], tensor), name


@pytest.mark.case("S07")
def test_the_learning_rate_is_a_function_of_steps_alone() -> None:
    trainee = make_trainee()
    rates = [trainee.train_step(ALONE).metrics["lr"] for _ in range(trainee.total_steps)]
    cosine = [
        0.001 + (0.1 - 0.001) * (1 + torch.cos(torch.tensor(torch.pi * step / 6)).item()) / 2
        for step in range(6)
    ]
    assert rates == pytest.approx(cosine, abs=1e-6)


def test_epoch_schedules_change_at_epochs_and_survive_a_resumption() -> None:
    schedule = {"lr": {"name": "step", "values": [0.1, 0.01], "update_interval": "epoch"}}
    config = small_config(optimizer={"name": "sgd", "param_schedulers": schedule})
    trainee = make_trainee(config)
    rates = [trainee.train_step(ALONE).metrics["lr"] for _ in range(6)]
    assert rates == [0.1, 0.1, 0.1, 0.01, 0.01, 0.01]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_evaluation_counts_each_held_out_sample_once(size: int) -> None:
    ranks = [make_trainee() for _ in range(size)]
    read: list[int] = []
    for rank in ranks:
        rank.task.datasets["test"].transform = _Noting(read)
    figures = FakeWorld(size).run(lambda reducer: ranks[reducer.rank].evaluate(reducer))
    dataset, model = ranks[0].task.datasets["test"], ranks[0].task.base_model.eval()
    assert len(read) == 50
    samples = [dataset[index] for index in range(50)]
    with torch.no_grad():
        output = model(torch.stack([sample["input"] for sample in samples]))
    labels = torch.tensor([sample["target"] for sample in samples])
    top3 = (output.topk(3, dim=1).indices == labels.unsqueeze(1)).any(1).sum().item() / 50
    assert [one["test_accuracy"] for one in figures] == [
        (output.argmax(1) == labels).sum().item() / 50
    ] * size
    assert figures[0]["test_accuracy_top_3"] == pytest.approx(top3)
    assert figures[0]["test_loss"] == pytest.approx(torch.nn.functional.cross_entropy(output, labels).item())


def test_an_evaluation_may_be_run_again() -> None:
    trainee = make_trainee()
    assert trainee.evaluate(ALONE) == trainee.evaluate(ALONE)


def test_evaluation_is_due_once_at_each_epochs_end() -> None:
    trainee, due = make_trainee(), []
    while trainee.step < trainee.total_steps:
        trainee.train_step(ALONE)
        if trainee.evaluation_due():
            due.append(trainee.step)
            trainee.evaluate(ALONE)
            assert not trainee.evaluation_due()
    assert due == [3, 6]


def test_a_test_phase_period_is_honoured_and_the_last_epoch_is_always_evaluated() -> None:
    trainee = make_trainee(small_config(num_epochs=5, test_phase_period=2))
    assert [step for step in range(1, 16) if trainee.schedule.evaluates_at(step)] == [6, 12, 15]


def test_mixup_works_with_odd_shards_and_does_not_depend_on_the_world_size() -> None:
    config = small_config(mixup={"alpha": 0.2, "num_classes": 10}, loss={"name": "soft_target_cross_entropy"})
    (alone,) = train(1, config)  # the last batch of 10 has shards of 3, 3, 2 and 2
    assert largest_difference(snapshot(train(3, config)[0]), snapshot(alone)) < 1e-6


def test_averaged_weights_are_used_for_evaluation_and_export_only() -> None:
    config = small_config(hooks=[{"name": "ema_model_weights", "decay": 0.5}])
    (plain,), (trainee,) = train(1), train(1, config)
    live = snapshot(plain)
    trained = {name: tensor for name, tensor in snapshot(trainee).items() if not name.startswith("average")}
    assert largest_difference(trained, live) == 0
    with_average = trainee.evaluate(ALONE)
    assert with_average["test_loss"] != plain.evaluate(ALONE)["test_loss"]
    assert (
        largest_difference(
            {name: tensor for name, tensor in snapshot(trainee).items() if not name.startswith("average")},
            live,
        )
        == 0
    )


def test_gradient_clipping_acts_on_the_summed_gradient() -> None:
    (alone,) = train(1, small_config(clip_grad_norm=0.1))
    ranks = train(3, small_config(clip_grad_norm=0.1))
    assert largest_difference(snapshot(ranks[0]), snapshot(alone)) < ROUNDING
    assert largest_difference(snapshot(alone), snapshot(train(1)[0])) > 1e-3


def test_label_smoothing_does_not_depend_on_the_world_size() -> None:
    loss = {"name": "label_smoothing_cross_entropy", "smoothing_param": 0.1}
    (alone,) = train(1, small_config(loss=loss))
    assert largest_difference(snapshot(train(3, small_config(loss=loss))[0]), snapshot(alone)) < 1e-6
    assert largest_difference(snapshot(alone), snapshot(train(1)[0])) > 1e-4


def test_bf16_computes_otherwise_and_equally_at_any_world_size() -> None:
    options = {"precision": "bf16", "deterministic": True}
    (alone,) = train(1, dropout_config(), **options)
    for rank in train(3, dropout_config(), **options):
        assert largest_difference(snapshot(rank), snapshot(alone)) == 0
    losses = [
        make_trainee(dropout_config(), precision=precision).train_step(ALONE).metrics["loss"]
        for precision in ("float32", "bf16")
    ]
    assert losses[0] != losses[1] == pytest.approx(losses[0], rel=0.02)
    assert {tensor.dtype for tensor in snapshot(alone).values()} <= {torch.float32, torch.int64}


def poisoned(trainee: ClassyTrainee, sample: int) -> ClassyTrainee:
    """Make the image of one sample no number."""
    trainee.task.datasets["train"].dataset._images[sample] = float("nan")
    return trainee


def test_a_loss_that_is_no_number_stops_with_the_samples_named_and_changes_nothing() -> None:
    ranks = [poisoned(make_trainee(), sample=7) for _ in range(2)]
    before = snapshot(ranks[0])
    step, shard_ids = next(
        (step, ids) for step in range(3) for ids in ranks[0]._shards(step, ALONE).values() if 7 in ids
    )

    def work(reducer: Any) -> str:
        try:
            for _ in range(3):
                ranks[reducer.rank].train_step(reducer)
        except FloatingPointError as error:
            return str(error)
        raise AssertionError("the epoch was trained")

    messages = FakeWorld(2).run(work)
    assert all(f"the loss is nan at step {step} (epoch 0), from " in message for message in messages)
    assert sorted("of another rank" in message for message in messages) == [False, True]
    named = next(message for message in messages if "of another rank" not in message)
    assert f"the shard of samples {', '.join(map(str, shard_ids))}: lower" in named
    assert ranks[0].step == step
    assert step > 0 or largest_difference(snapshot(ranks[0]), before) == 0


def test_a_step_that_is_no_number_may_be_passed_over_by_all_ranks_alike() -> None:
    ranks = [poisoned(make_trainee(non_finite="skip"), sample=7) for _ in range(2)]

    def work(reducer: Any) -> list[dict[str, float]]:
        return [dict(ranks[reducer.rank].train_step(reducer).metrics) for _ in range(3)]

    reports = FakeWorld(2).run(work)
    assert reports[0] == reports[1]
    assert [report.get("steps_passed_over", 0) for report in reports[0]].count(1) == 1
    assert largest_difference(snapshot(ranks[0]), snapshot(ranks[1])) == 0
    assert all(tensor.isfinite().all() for tensor in snapshot(ranks[0]).values())
    assert ranks[0].step == 3


def test_a_model_that_is_lost_is_not_passed_over_for_ever() -> None:
    trainee = make_trainee(small_config(num_epochs=9), non_finite="skip")
    with torch.no_grad():
        next(iter(trainee.parameters().values())).fill_(float("nan"))
    for _ in range(10):
        trainee.train_step(ALONE)
    with pytest.raises(FloatingPointError, match=r"nan at step 10 .*, after 10 steps passed over"):
        trainee.train_step(ALONE)


@pytest.mark.case("S08")
@pytest.mark.parametrize("sizes", [(2, 2, 1, 1), (1, 3, 3, 2), (2, 4, 1, 3)])
def test_two_saves_in_one_epoch_at_other_world_sizes_lose_and_repeat_nothing(sizes: tuple[int, ...]) -> None:
    options = {"global_batch": 20}  # steps of 20, 20, 20 and 14 samples
    (undisturbed,) = train(1, steps=4, **options)
    state: dict[str, Any] = {}
    seen: list[int] = []
    for size in sizes:
        ranks = [make_trainee(**options) for _ in range(size)]  # every process is a new one
        for rank in ranks:
            if state:
                rank.load_state_dict(state)

        def work(reducer: Any, ranks: list[ClassyTrainee] = ranks) -> list[int]:
            ids = list(ranks[reducer.rank].sample_ids(reducer))
            ranks[reducer.rank].train_step(reducer)
            return ids

        seen += [index for ids in FakeWorld(size).run(work) for index in ids]
        state = ranks[0].state_dict()
    assert Counter(seen) == dict.fromkeys(range(74), 1)
    assert largest_difference(snapshot(ranks[0]), snapshot(undisturbed)) < ROUNDING


# ---- state -----------------------------------------------------------------------------------


@pytest.mark.case("C08")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_resumption_in_mid_epoch_equals_the_uninterrupted_run(optimizer: str) -> None:
    settings = {"sgd": {"momentum": 0.9}, "adamw": {"lr": 0.01}}[optimizer]
    config = dropout_config(optimizer={"name": optimizer, "param_schedulers": {}, **settings})
    config["hooks"] = [{"name": "ema_model_weights", "decay": 0.9}]
    whole, first = make_trainee(config), make_trainee(config)
    for _ in range(6):
        whole.train_step(ALONE)
    for _ in range(2):
        first.train_step(ALONE)
    state = first.state_dict()

    second = make_trainee(config)
    second.load_state_dict(state)
    first.train_step(ALONE)  # the state was taken over, not shared
    assert second.step == 2
    for _ in range(4):
        second.train_step(ALONE)

    assert largest_difference(snapshot(second), snapshot(whole)) == 0


def test_survivors_of_changing_worlds_end_as_the_undisturbed_run() -> None:
    (undisturbed,) = train(1, dropout_config())
    ranks = [make_trainee(dropout_config()) for _ in range(3)]
    for size in (3, 1, 3, 2, 1, 2):

        def work(reducer: Any) -> None:
            ranks[reducer.rank].train_step(reducer)

        FakeWorld(size).run(work)
        for rank in ranks[1:]:
            rank.load_state_dict(ranks[0].state_dict())
    assert largest_difference(snapshot(ranks[2]), snapshot(undisturbed)) < ROUNDING


def test_a_state_at_step_zero_clears_what_the_optimizer_had() -> None:
    fresh, trained = make_trainee(), make_trainee()
    trained.train_step(ALONE)
    trained.load_state_dict(fresh.state_dict())
    assert trained.step == 0
    assert largest_difference(snapshot(trained), snapshot(fresh)) == 0


def test_a_state_survives_a_weights_only_file(tmp_path: Any) -> None:
    (trainee,) = train(1, small_config(optimizer={"name": "adam", "param_schedulers": {}}), steps=2)
    torch.save(trainee.state_dict(), tmp_path / "state.pt")
    other = make_trainee(trainee.recipe.config)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert largest_difference(snapshot(other), snapshot(trainee)) == 0


def test_a_state_of_another_model_is_refused_with_the_first_tensor_and_both_shapes() -> None:
    wider = small_config()
    wider["model"] = {
        **wider["model"],
        "init_planes": 8,
        "heads": [{**wider["model"]["heads"][0], "in_plane": 8}],
    }
    trainee = make_trainee()
    before = snapshot(trainee)
    with pytest.raises(RefusedInput) as refusal:
        trainee.load_state_dict(make_trainee(wider).state_dict())
    assert "tensor 'initial_block._module.0.weight' has shape (8, 3, 3, 3), and (4, 3, 3, 3)" in str(
        refusal.value
    )
    assert largest_difference(snapshot(trainee), before) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"global_batch": 16}, "training.elastic.global_batch was 16 and is 32 now"),
        ({"shards": 8}, "training.elastic.virtual_shards was 8 and is 4 now"),
        ({"seed": 1}, "training.elastic.seed was 1 and is 0 now"),
    ],
)
def test_a_state_of_another_way_of_training_is_refused(change: dict[str, int], message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        make_trainee().load_state_dict(make_trainee(**change).state_dict())


def test_a_state_of_another_data_set_or_optimizer_is_refused() -> None:
    fewer = small_config()
    fewer["dataset"]["train"]["num_samples"] = 70
    with pytest.raises(RefusedInput, match="number of training samples was 70 and is 74 now"):
        make_trainee().load_state_dict(make_trainee(fewer).state_dict())
    adam = small_config(optimizer={"name": "adam", "param_schedulers": {}})
    with pytest.raises(RefusedInput, match="section 'optimizer' of the Classy Vision config has changed"):
        make_trainee().load_state_dict(make_trainee(adam).state_dict())


# ---- loader processes ------------------------------------------------------------------------


@pytest.mark.slow
def test_loader_processes_change_nothing_and_survive_a_change_of_the_world() -> None:
    config = dropout_config()
    config["dataset"]["train"]["num_workers"] = 2
    (alone,) = train(1, dropout_config())
    ranks = [make_trainee(config) for _ in range(2)]
    for size in (1, 2, 1, 2, 2, 1):

        def work(reducer: Any) -> None:
            ranks[reducer.rank].train_step(reducer)

        FakeWorld(size).run(work)
        if size == 1:
            ranks[1].load_state_dict(ranks[0].state_dict())
    assert largest_difference(snapshot(ranks[0]), snapshot(alone)) < ROUNDING


@pytest.mark.parametrize(
    ("num_workers", "in_memory", "cpus", "processes"),
    [
        (None, True, 8, 0),
        (None, False, 8, 4),
        (None, False, 2, 1),
        (None, False, 1, 1),
        (0, False, 8, 0),
        (3, True, 8, 3),
    ],
)
def test_loader_processes_follow_config_memory_and_cpus(
    num_workers: int | None, in_memory: bool, cpus: int, processes: int
) -> None:
    config = small_config()
    config["dataset"]["train"]["num_workers"] = num_workers
    trainee = ClassyTrainee(Recipe(config=config, global_batch=32, shards=4, seed=0), cpus=cpus)
    trainee.task.datasets["train"].in_memory = in_memory
    assert trainee.loader_processes("train") == processes
