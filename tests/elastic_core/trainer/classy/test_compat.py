"""What is broken in Classy Vision 0.7.0 on today's numpy and torch, and works here."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import classy_vision
import numpy as np
import pytest
import torch
from PIL import Image

from elastic_core.errors import RefusedInput
from elastic_core.model.job import JobSpec
from elastic_core.trainer.classy.compat import build_transforms
from elastic_core.trainer.classy.legacy import read_command
from elastic_core.trainer.classy.preload import use_once
from elastic_core.trainer.classy.seeds import derive, random_state_kept, seed_all
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.validate import validate_training
from tests.elastic_core.trainer.classy.conftest import make_trainee, small_config

CONFIGS = sorted((Path(classy_vision.__file__).parent / "configs").rglob("*.json"))


def test_imagenet_autoaugment_works_with_todays_numpy() -> None:
    augment = build_transforms([{"name": "imagenet_autoaugment"}, {"name": "ToTensor"}])
    for seed in range(30):  # enough to meet every sub-policy's posterize
        seed_all(seed)
        assert augment(Image.new("RGB", (32, 32), (90, 120, 30))).shape == (3, 32, 32)


def test_the_optimizer_adamw_mt_works_and_equals_adamw() -> None:
    weights = []
    for name in ("adamw", "adamw_mt"):
        trainee = make_trainee(small_config(optimizer={"name": name, "lr": 0.01, "param_schedulers": {}}))
        trainee.train_step(SoloReducer())
        weights.append(torch.cat([parameter.flatten() for parameter in trainee.parameters().values()]))
    assert torch.allclose(*weights, atol=1e-6)


def test_the_average_of_weights_needs_no_gpu() -> None:
    trainee = make_trainee(small_config(hooks=[{"name": "ema_model_weights", "decay": 0.9, "device": "gpu"}]))
    trainee.train_step(SoloReducer())
    assert all(average.device.type == "cpu" for average in trainee.average.averages.values())


@pytest.mark.case("V03")
@pytest.mark.parametrize("config", CONFIGS, ids=[path.stem for path in CONFIGS])
def test_classy_visions_own_configs_lack_nothing_but_their_data(config: Path) -> None:
    if config.stem in ("r3d34_synthetic_video", "resnet50_synthetic_image_classy_config"):
        pytest.skip("has its data: `python -m benchmarks.classy_configs` trains it")
    job = JobSpec.model_validate({"training": {"kind": "classy", "config": str(config)}})
    expected = ("does not exist; give the directory", "no longer decodes video", "fine_tuning starts from")
    problems = validate_training(job, Path())
    assert problems
    assert all(any(words in problem for words in expected) for problem in problems), problems


@pytest.mark.slow
def test_preloading_leaves_one_thread_and_a_fork_can_train_at_once() -> None:
    program = """
import json, os, sys
import torch
torch.set_num_threads(1)
import elastic_core.trainer.classy.preload
threads = len(os.listdir("/proc/self/task"))
loaded = set(sys.modules)
from pathlib import Path
from elastic_core.model.job import JobSpec
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.worker import build_trainee
child = os.fork()
if child == 0:
    trainee = build_trainee(JobSpec(), Path.cwd())
    trainee.set_up()
    trainee.train_step(SoloReducer())
    late = sorted(name for name in sys.modules.keys() - loaded)
    sys.stderr.write(json.dumps({"threads": threads, "late": late, "cuda": torch.cuda.is_initialized()}))
    os._exit(0)
sys.exit(os.waitpid(child, 0)[1])
"""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        timeout=90,
        check=True,
    )
    assert json.loads(done.stderr) == {"threads": 1, "late": [], "cuda": False}


def test_using_everything_once_leaves_the_random_state_alone() -> None:
    state = torch.get_rng_state()
    use_once()
    assert torch.equal(torch.get_rng_state(), state)


def test_importing_the_package_imports_neither_torch_nor_classy_vision() -> None:
    program = (
        "import sys, elastic_core.trainer.__main__, elastic_core.trainer.classy.validate\n"
        "assert not {'torch', 'classy_vision', 'torchvision'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


# ---- command lines of old ------------------------------------------------------------------------


@pytest.mark.case("V01")
def test_an_old_command_becomes_a_config_with_a_note_for_each_changed_flag() -> None:
    command = read_command(["--config_file=c.json", "--device", "gpu", "--num-workers=0", "--show_progress"])
    assert command.config == "c.json"
    assert command.apply(small_config())["dataset"]["test"]["num_workers"] == 0
    assert [note.split(":")[0] for note in command.notes] == [
        "--device",
        "--num_workers=0",
        "--show_progress",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--num_workers=0"], "argument --config_file: is required"),
        (["--config_file=c.json", "--num_worker=0"], "argument --num_worker 0: is not known"),
        (["--config_file=c.json", "--num_workers=many"], "argument --num_workers many: is not known"),
    ],
)
def test_an_old_command_that_cannot_be_understood_is_refused(args: list[str], message: str) -> None:
    with pytest.raises(RefusedInput, match=message):
        read_command(args)


# ---- seeds -----------------------------------------------------------------------------------


def test_seeds_differ_by_purpose_and_place_and_fit_every_generator() -> None:
    places: list[tuple[Any, ...]] = [(0, "a"), (0, "b"), (1, "a"), (0, "a", 0), (0, "a", 1), (0, "a", 0, 1)]
    seeds = [derive(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert derive(0, "a") == 6612858177627257344, "another value would change what every job learns"


def test_seeding_inside_a_block_changes_nothing_outside() -> None:
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    with random_state_kept():
        seed_all(99)
    after = (torch.rand(1).item(), random.random(), np.random.rand())
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    assert after == (torch.rand(1).item(), random.random(), np.random.rand())
