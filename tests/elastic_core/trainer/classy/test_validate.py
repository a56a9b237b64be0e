from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from elastic_core.model.job import JobSpec
from elastic_core.trainer.classy.compat import build_model
from elastic_core.trainer.classy.trainee import ClassyTrainee
from elastic_core.trainer.classy.validate import judge, validate_training
from tests.elastic_core.trainer.classy.conftest import small_config

GONE = object()


class Mistake(NamedTuple):
    """One change to a good config, and what the problem must say."""

    path: str
    value: Any
    says: str


CONFIG = "training.config"

MISTAKES = [
    # keys and values that reading shows
    Mistake("num_epoch", 3, "num_epoch: unknown key 'num_epoch' (did you mean 'num_epochs'?); allowed: "),
    Mistake("hook", [], "hook: unknown key 'hook' (did you mean 'hooks'?)"),
    Mistake("num_epochs", 0, "num_epochs: is 0; it must be a whole number of at least 1"),
    Mistake("num_epochs", "3", "num_epochs: is '3'; it must be a whole number"),
    Mistake("num_epochs", GONE, "num_epochs: is required"),
    Mistake("name", "clasification_task", "name: task 'clasification_task' is not registered"),
    Mistake("loss", GONE, "loss: is required"),
    Mistake("model", GONE, "model: is required"),
    Mistake("optimizer", GONE, "optimizer: is required"),
    Mistake("meters", GONE, "meters: is required"),
    Mistake("meters", [{"name": "accuracy"}], "meters: is [{'name': 'accuracy'}]; it must be a mapping"),
    Mistake("meters.accuracy.topk", 1, "meters.accuracy.topk: is 1; it must be a list"),
    Mistake("meters.accuracy.top", [1], "meters.accuracy.top: unknown key 'top' (did you mean 'topk'?)"),
    Mistake("dataset.tset", {}, "dataset.tset: unknown key 'tset' (did you mean 'test'?)"),
    Mistake("dataset.test", GONE, "dataset.test: is required; nothing would be evaluated"),
    Mistake("dataset.train", GONE, "dataset.train: is required"),
    Mistake(
        "dataset.train.batchsize_per_replica", 0, "dataset.train.batchsize_per_replica: is 0; it must be"
    ),
    Mistake("dataset.train.batchsize_per_replica", GONE, "dataset.train.batchsize_per_replica: is required"),
    Mistake(
        "dataset.train.use_shuffle", "yes", "dataset.train.use_shuffle: is 'yes'; it must be true or false"
    ),
    Mistake("dataset.train.num_workers", -1, "dataset.train.num_workers: is -1; it must be a whole number"),
    Mistake(
        "dataset.train.num_samples", 0, "dataset.train.num_samples: is 0; it must be null or a whole number"
    ),
    Mistake("dataset.train.phases_per_epoch", 2, "dataset.train.phases_per_epoch: "),
    Mistake(
        "dataset.train.transforms",
        {"name": "x"},
        "dataset.train.transforms: is {'name': 'x'}; it must be a list",
    ),
    Mistake(
        "dataset.train.name",
        "kinetics400",
        "'kinetics400' cannot be read: torchvision no longer decodes video",
    ),
    Mistake("loss.reduction", "sum", "loss.reduction: is 'sum'; it must be 'mean'"),
    Mistake("optimizer.weight_decay", "1e-4", "optimizer.weight_decay: is '1e-4'; it must be a number"),
    Mistake("optimizer.param_schedulers", GONE, "optimizer.param_schedulers: is required; without it"),
    Mistake("clip_grad_norm", 0, "clip_grad_norm: is 0; it must be a number over 0"),
    Mistake("test_only", True, "test_only: is True; it must be false"),
    Mistake("amp_args", {"amp_type": "pytorch"}, "remove amp_args and set training.elastic.precision: bf16"),
    Mistake(
        "distributed", {"batch_norm_sync_mode": "pytorch"}, "batch_norm_sync_mode: is 'pytorch': synchronised"
    ),
    Mistake(
        "distributed",
        {"find_unused": True},
        "distributed.find_unused: unknown key 'find_unused' (did you mean",
    ),
    Mistake("mixup", {"num_classes": 10}, "mixup.alpha: is required"),
    Mistake("mixup", {"alpha": 1, "num_classes": 10, "prob": 1}, "mixup.prob: unknown key 'prob'"),
    Mistake("hooks", [{"name": "visdom"}], "hooks[0].name: hook 'visdom' is not run: remove it: use tensor"),
    *(
        Mistake("hooks", [{"name": name}], f"hooks[0].name: hook {name!r} is not run: remove it")
        for name in ("checkpoint", "model_tensorboard", "output_csv", "torchscript")
    ),
    Mistake("dataset.train.download", True, "dataset.train.download: every worker would download: unpack"),
    Mistake("hooks", [{"name": "precise_bn"}], "hooks[0].num_samples: is required"),
    Mistake(
        "hooks", [{"name": "profiler", "steps": 1000}], "hooks[0].steps: is 1000; it must be a whole numb"
    ),
    Mistake(
        "hooks", [{"name": "profiler", "step": 1}], "hooks[0].step: unknown key 'step' (did you mean 'ste"
    ),
    Mistake(
        "hooks", [{"name": "tensorboard_plot", "tb_writer": {}}], "hooks[0].tb_writer: curves are written"
    ),
    Mistake("hooks", [{"name": "profiler"}] * 2, "hooks[1]: there is a hook 'profiler' already"),
    Mistake(
        "hooks",
        [{"name": "precise_bn", "num_samples": 9}, {"name": "ema_model_weights", "decay": 0.9}],
        "hooks: precise_bn would leave the averaged weights",
    ),
    Mistake(
        "hooks",
        [{"name": "my_hook"}],
        "hooks[0].name: hook 'my_hook' is not supported; allowed: ema_model_weights, loss_lr",
    ),
    Mistake(
        "hooks",
        [{"name": "ema_model_weights", "decay": 2}],
        "hooks[0].decay: is 2; it must be a number from 0",
    ),
    Mistake(
        "num_workers",
        0,
        "num_workers: is no key of a task but an old command-line flag: it belongs into dataset",
    ),
    Mistake("device", "gpu", "device: is no key of a task but an old command-line flag"),
    Mistake("checkpoint_folder", "./x_{time.time()}", "checkpoint_folder: is './x_{time.time()}': fill in"),
    Mistake(
        "checkpoint_folder",
        "./x",
        "checkpoint_folder: is no key of a task but an old command-line flag: checkpoints",
    ),
    Mistake("dataset.train.root", "<path to data>", "dataset.train.root: is '<path to data>': fill in"),
    Mistake("dataset.train.root", "/no/such/place", "dataset.train.root: '/no/such/place' does not exist"),
    # names
    Mistake("dataset.train.name", "digit", "dataset 'digit' is not registered (did you mean 'digits'?)"),
    Mistake("model.name", "resnt", "model.name: model 'resnt' is not registered (did you mean 'resnet'?)"),
    Mistake("loss.name", "CrossEntropyLos", "(did you mean 'CrossEntropyLoss'?)"),
    Mistake(
        "optimizer.name", "sdg", "optimizer.name: optimizer 'sdg' is not registered (did you mean 'sgd'?)"
    ),
    Mistake(
        "optimizer.param_schedulers.lr.name",
        "cosin",
        "param_schedulers.lr.name: schedule 'cosin' is not registered",
    ),
    Mistake(
        "meters",
        {"acuracy": {"topk": [1]}},
        "meters.acuracy: meter 'acuracy' is not registered (did you mean 'acc",
    ),
    Mistake(
        "model.heads.0.name", "fully_conected", "model.heads[0].name: head 'fully_conected' is not registered"
    ),
    Mistake(
        "dataset.train.transforms", [{"name": "ToTensr"}], "transforms[0].name: transform 'ToTensr' is not"
    ),
    # what nobody reads, and what cannot be built
    Mistake(
        "dataset.train.num_wokers",
        2,
        "dataset.train.num_wokers: unknown key 'num_wokers' (did you mean 'num_workers",
    ),
    Mistake(
        "model.smal_input", True, "model.smal_input: unknown key 'smal_input' (did you mean 'small_input'?)"
    ),
    Mistake(
        "model.heads.0.num_clases",
        9,
        "model.heads[0].num_clases: unknown key 'num_clases' (did you mean 'num_cl",
    ),
    Mistake(
        "optimizer.weightdecay",
        0.1,
        "optimizer.weightdecay: unknown key 'weightdecay' (did you mean 'weight_decay'",
    ),
    Mistake("optimizer.param_schedulers.lr.end", 0, "lr.end: unknown key 'end'; allowed: end_value, name"),
    Mistake(
        "optimizer.param_schedulers.lr.start_value",
        GONE,
        "missing 1 required positional argument: 'start_value'",
    ),
    Mistake("model.num_blocks", GONE, "model: AssertionError without a message; it looked for num_blocks"),
    Mistake("model.heads.0.fork_block", "block9-9", "block9-9 not found"),
    Mistake("dataset.test.split", "tests", "dataset.test: ValueError: \"split\" of the digits is 'tests'"),
    Mistake("dataset.train.num_samples", 5000, "dataset.train.num_samples: Num samples"),
    # what only training shows
    Mistake("model.heads.0.in_plane", 5, "a head's in_plane must be the channels of the block"),
    Mistake(
        "model.heads",
        GONE,
        "model.heads: the model's output has shape (2, 4, 16, 16), not (samples, classes)",
    ),
    Mistake(
        "model.heads.0.num_classes",
        4,
        "model: it has 4 outputs and there are labels up to 9: set num_classes to",
    ),
    Mistake("meters.accuracy.topk", [1, 11], "meters.accuracy.topk: asks for the best 11 of 10 classes"),
    Mistake("loss.name", "BCELoss", "training a shard of 2 samples fails: "),
]


def change(config: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    section: Any = config
    for part in parents:
        section = section[part]
    if value is GONE:
        del section[last]
    else:
        section[last] = value


def job_of(config: dict[str, Any] | str, **training: Any) -> JobSpec:
    elastic = {"global_batch": 32, "virtual_shards": 4}
    return JobSpec.model_validate(
        {"training": {"kind": "classy", "config": config, "elastic": elastic, **training}}
    )


def problems_of(config: dict[str, Any], base: Path = Path(), **training: Any) -> list[str]:
    return validate_training(job_of(config, **training), base)


def test_a_good_config_has_no_problem_and_is_summed_up() -> None:
    verdict = judge(job_of(small_config()), Path())
    assert verdict.problems == ()
    assert verdict.summary == (
        "model resnet with 470 parameters and 0.2 MFLOP a sample, 74 training and 50 "
        "held-out samples, 6 steps in 2 epochs, "
        "global batch 32 in 4 shards, learning rate 0.1 at most"
    )


@pytest.mark.parametrize(
    "mistake", MISTAKES, ids=[f"{number}-{one.path}" for number, one in enumerate(MISTAKES)]
)
def test_a_mistake_is_told_with_its_path_and_remedy(mistake: Mistake) -> None:
    config = copy.deepcopy(small_config())
    change(config, mistake.path, mistake.value)
    problems = problems_of(config)
    assert any(mistake.says in problem for problem in problems), problems
    assert all(problem.startswith(("training.config", "training.elastic")) for problem in problems)
    assert len(problems) <= 2, problems


def test_there_are_enough_planted_mistakes() -> None:
    assert len(MISTAKES) >= 40


def test_every_mistake_is_told_at_once() -> None:
    config = small_config()
    for path, value in (
        ("num_epochs", 0),
        ("dataset.train.batchsize_per_replica", 0),
        ("hook", []),
        ("meters", GONE),
    ):
        change(config, path, value)
    assert [problem.split(":")[0] for problem in problems_of(config)] == [
        f"{CONFIG}.meters",
        f"{CONFIG}.hook",
        f"{CONFIG}.num_epochs",
        f"{CONFIG}.dataset.train.batchsize_per_replica",
    ]


def test_mistakes_in_several_parts_that_only_building_shows_are_told_at_once() -> None:
    config = small_config()
    for path in ("model.smal_input", "optimizer.weightdecay", "dataset.test.num_wokers", "loss.smoothing"):
        change(config, path, 1)
    places = [problem.split(":")[0].removeprefix(f"{CONFIG}.") for problem in problems_of(config)]
    assert places == ["dataset.test.num_wokers", "model.smal_input", "loss", "optimizer.weightdecay"]


def test_a_config_that_cannot_be_read_is_told_with_its_path(tmp_path: Path) -> None:
    (missing,) = validate_training(job_of("none.json"), tmp_path)
    assert missing.startswith(f"training.config: '{tmp_path}/none.json': No such file")
    (tmp_path / "broken.json").write_text('{"name": ,}')
    (broken,) = validate_training(job_of("broken.json"), tmp_path)
    assert "broken.json' is not JSON: Expecting value: line 1 column 10" in broken


@pytest.mark.case("V05")
def test_a_config_like_the_vit_examples_is_good_once_its_mixed_precision_is_the_jobs() -> None:
    head = {"name": "vision_transformer_head", "unique_id": "h", "num_classes": 10, "in_plane": 8}
    shape = {
        "image_size": 16,
        "patch_size": 8,
        "num_layers": 1,
        "num_heads": 2,
        "hidden_dim": 8,
        "mlp_dim": 8,
    }
    config = small_config(
        amp_args={"amp_type": "pytorch"},
        clip_grad_norm=1.0,
        mixup={"alpha": 0.5, "num_classes": 10},
        loss={"name": "soft_target_cross_entropy"},
        simulated_global_batchsize=32,
        model={"name": "vision_transformer", **shape, "heads": [{**head, "fork_block": "trunk_output"}]},
    )
    augment = [{"name": "ToPILImage"}, {"name": "imagenet_autoaugment"}, {"name": "ToTensor"}]
    config["dataset"]["train"]["transforms"] = [
        {"name": "apply_transform_to_key", "key": "input", "transforms": augment}
    ]
    (problem,) = problems_of(config)
    assert problem.startswith(f"{CONFIG}.amp_args: apex and float16 are not supported")
    assert problem.endswith("remove amp_args and set training.elastic.precision: bf16")
    del config["amp_args"]
    elastic = {"virtual_shards": 4, "precision": "bf16"}
    assert problems_of(config, elastic=elastic) == []


def test_hooks_whose_work_is_done_anyway_may_stay_in_a_config() -> None:
    names = ("loss_lr_meter_logging", "progress_bar", "model_complexity")
    assert problems_of(small_config(hooks=[{"name": name} for name in names])) == []


def test_what_could_not_be_read_back_from_a_checkpoint_is_told_before_it_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def with_a_path(trainee: ClassyTrainee) -> dict[str, Any]:
        return {"figures": {"best": Path("somewhere")}}

    monkeypatch.setattr(ClassyTrainee, "state_dict", with_a_path)
    (problem,) = problems_of(small_config())
    assert problem.startswith(
        f"{CONFIG}: the training's state could not be read back from a checkpoint: Unpick"
    )
    assert "pathlib" in problem


@pytest.mark.case("V02", "F14")
def test_an_unregistered_data_set_points_at_the_user_package() -> None:
    config = small_config()
    config["dataset"]["train"]["name"] = "my_dataset"
    (problem,) = problems_of(config)
    assert "dataset 'my_dataset' is not registered; known: " in problem
    assert problem.endswith("set training.user_package if it is your own")


def test_a_user_package_registers_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_parts").mkdir()
    (tmp_path / "their_parts" / "__init__.py").touch()
    (tmp_path / "their_parts" / "data.py").write_text(
        "from classy_vision.dataset import register_dataset\n"
        "from elastic_core.trainer.classy.digits import DigitsDataset\n"
        "@register_dataset('their_digits')\n"
        "class TheirDigits(DigitsDataset):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = small_config()
    config["dataset"]["train"]["name"] = "their_digits"
    assert problems_of(config, user_package="their_parts") == []
    (problem,) = problems_of(config, user_package="no_such_package")
    assert problem.startswith(
        "training.user_package: importing 'no_such_package' failed: ModuleNotFoundError"
    )


@pytest.mark.case("V07")
def test_fine_tuning_needs_a_checkpoint_that_is_there(tmp_path: Path) -> None:
    config = small_config(name="fine_tuning", freeze_trunk=True, reset_heads=True)
    (problem,) = problems_of(config)
    assert problem == f"{CONFIG}.pretrained_checkpoint: is required; fine_tuning starts from a trained model"
    config["pretrained_checkpoint"] = str(tmp_path / "trunk.pt")
    (problem,) = problems_of(config)
    assert problem.startswith(f"{CONFIG}.pretrained_checkpoint: '{tmp_path}/trunk.pt' does not exist")
    state = {"classy_state_dict": {"base_model": build_model(config["model"]).get_classy_state()}}
    torch.save(state, tmp_path / "trunk.pt")
    assert problems_of(config) == []


def test_a_global_batch_must_reach_for_all_shards_and_lie_within_the_data() -> None:
    (problem,) = problems_of(small_config(), elastic={"global_batch": 3, "virtual_shards": 4})
    assert problem.startswith("training.elastic.global_batch: is 3, less than the 4 virtual shards")
    (problem,) = problems_of(small_config(), elastic={"global_batch": 75})
    assert problem.startswith("training.elastic.global_batch: is 75, more than the 74 samples")


def test_a_last_batch_that_batchnorm_cannot_train_is_told() -> None:
    config = small_config(
        model={"name": "mlp", "input_dim": 768, "output_dim": 10, "hidden_dims": [8], "use_batchnorm": True}
    )
    config["dataset"]["train"]["num_samples"] = 66  # a last batch of 2 in 4 shards: two of one sample
    (problem,) = problems_of(config)
    assert "BatchNorm cannot train 1 sample alone: change training.elastic.global_batch" in problem


def test_a_checkpoint_directory_must_be_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    job = job_of(small_config()).model_copy(
        update={"checkpoint": JobSpec().checkpoint.model_copy(update={"directory": "file/checkpoints"})}
    )
    (problem,) = validate_training(job, tmp_path)
    assert problem.startswith("checkpoint.directory: 'file/checkpoints' cannot be written")


# ---- the cache -------------------------------------------------------------------------------


def test_a_good_job_is_remembered_but_its_paths_are_looked_up_every_time(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    config = small_config()
    config["dataset"]["train"]["root"] = "data"  # digits do not read it: only the look-up does
    cache = tmp_path / "cache"
    first = judge(job_of(config), tmp_path, cache=cache)
    assert [problem.split(":")[0] for problem in first.problems] == [f"{CONFIG}.dataset.train.root"]
    assert not cache.exists(), "only good jobs are remembered"
    del config["dataset"]["train"]["root"]
    good = judge(job_of(config), tmp_path, cache=cache)
    (remembered,) = cache.iterdir()
    remembered.write_text(json.dumps({"summary": "from the cache"}))
    assert judge(job_of(config), tmp_path, cache=cache).summary == "from the cache"
    config["num_epochs"] = 3
    assert judge(job_of(config), tmp_path, cache=cache).summary == good.summary.replace(
        "6 steps in 2", "9 steps in 3"
    )


# ---- scripts ---------------------------------------------------------------------------------


def script_job(script: str, **training: Any) -> JobSpec:
    return JobSpec.model_validate({"training": {"kind": "script", "script": script, **training}})


def test_a_script_is_compiled_and_never_run(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text("raise SystemExit('ran')\n")
    assert validate_training(script_job("good.py"), tmp_path) == []
    (tmp_path / "bad.py").write_text("x = 1\nif x\n    pass\n")
    (problem,) = validate_training(script_job("bad.py"), tmp_path)
    assert problem == "training.script: bad.py:2: expected ':': 'if x'"
    (problem,) = validate_training(script_job("none.py", preload=["no_such_module"]), tmp_path)[:1]
    assert problem.startswith("training.script: 'none.py': No such file")


def test_classy_train_as_a_script_is_answered_with_the_job_to_write(tmp_path: Path) -> None:
    (tmp_path / "classy_train.py").touch()
    args = ["--config_file", "c.json", "--device=gpu", "--num_workers=0"]
    (problem,) = validate_training(script_job("classy_train.py", args=args), tmp_path)
    assert "write training.kind: classy with config: c.json" in problem
    assert "--num_workers=0: moved to num_workers of dataset.train and dataset.test" in problem
    assert "--device: dropped" in problem


# ---- the command -----------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_prints_one_line_a_problem_and_ends_with_two(tmp_path: Path) -> None:
    config = small_config(num_epochs=0, hook=[])
    (tmp_path / "job.yaml").write_text(json.dumps({"training": {"kind": "classy", "config": config}}))
    command = [sys.executable, "-m", "elastic_core.trainer", "validate", str(tmp_path / "job.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 2
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert len(json.loads(done.stdout)["problems"]) == 2
