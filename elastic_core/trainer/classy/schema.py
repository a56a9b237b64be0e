"""What can be said of a Classy Vision config by reading it: keys, types, values, paths.

Light: neither torch nor Classy Vision is imported, so a mistake here is told at once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from elastic_core.trainer.classy.hooks import find_hook_problems
from elastic_core.trainer.classy.problems import ROOT, at, missing_key, unknown_key, wrong_value

TASK_KEYS: Final = frozenset(
    [
        "name",
        "num_epochs",
        "loss",
        "dataset",
        "model",
        "optimizer",
        "meters",
        "hooks",
        "test_only",
        "test_phase_period",
        "amp_args",
        "mixup",
        "distributed",
        "bn_weight_decay",
        "clip_grad_norm",
        "simulated_global_batchsize",
        "use_sharded_ddp",
        "use_gpu",
    ]
)
FINE_TUNING_KEYS: Final = frozenset(
    ["pretrained_checkpoint", "pretrained_checkpoint_load_strict", "reset_heads", "freeze_trunk"]
)
DISTRIBUTED_KEYS: Final = frozenset(
    [
        "broadcast_buffers",
        "batch_norm_sync_mode",
        "batch_norm_sync_group_size",
        "find_unused_parameters",
        "bucket_cap_mb",
        "fp16_grad_compress",
    ]
)
MIXUP_KEYS: Final = frozenset(
    [
        "alpha",
        "num_classes",
        "cutmix_alpha",
        "cutmix_minmax",
        "mix_prob",
        "switch_prob",
        "mode",
        "label_smoothing",
    ]
)

OLD_FLAGS: Final = {
    "num_workers": "it belongs into dataset.train and dataset.test",
    "device": "remove it; use_gpu decides, and by default a GPU is used where there is one",
    "distributed_backend": "remove it; workers always train one model together",
    "checkpoint_folder": "checkpoints are set by the job's checkpoint.directory",
    "checkpoint_period": "checkpoints are set by the job's checkpoint.every_steps and every_seconds",
    "checkpoint_load_path": "remove it; the job's resume decides",
    "pretrained_checkpoint_path": "fine_tuning calls it pretrained_checkpoint",
    "profiler": "remove it; the hook profiler records a few steps",
    "show_progress": "remove it; progress is always told",
    "visdom_server": "remove it; the hook tensorboard_plot draws curves",
}
"""Command-line flags of classy_train.py, which some write into the config: what to do instead."""

_VIDEO: Final = ("kinetics400", "ucf101", "hmdb51")
_PATH_KEYS: Final = {"image_folder": ("root",), "image_path": ("image_folder",)}
_PATHS_ANYWHERE: Final = ("root", "image_folder", "folder", "dataset_path")
_PLACEHOLDER: Final = re.compile(r"\{\{?[^{}]*\}?\}|<[a-z][a-z_ -]*>|PATH/TO", re.IGNORECASE)


def find_problems(config: Mapping[str, Any], base: Path) -> list[str]:
    """Return every mistake that reading shows; relative paths start from `base`."""
    return [
        *_placeholders(config, ROOT),
        *_task(config),
        *_data(config, base),
        *_parts(config),
        *find_hook_problems(config),
    ]


def missing_paths(config: Mapping[str, Any], base: Path) -> list[str]:
    """Return the paths of a config that are not there: the part of the checks that time can undo."""
    found: list[str] = []
    data = config.get("dataset")
    for phase, section in data.items() if isinstance(data, Mapping) else ():
        if isinstance(section, Mapping):
            found += _paths(section, at(ROOT, "dataset", phase), base)
    checkpoint = config.get("pretrained_checkpoint")
    if isinstance(checkpoint, str) and checkpoint and not (base / checkpoint).exists():
        found.append(
            f"{at(ROOT, 'pretrained_checkpoint')}: {checkpoint!r} does not exist; give the path of a "
            "Classy Vision checkpoint"
        )
    return found


# ---- the parts ---------------------------------------------------------------------------------


def _placeholders(value: Any, path: str) -> Iterator[str]:
    """Find what a template left to be filled in."""
    if isinstance(value, str) and (found := _PLACEHOLDER.search(value)):
        yield f"{path}: is {value!r}: fill in {found.group()!r}"
    entries: Any = value.items() if isinstance(value, Mapping) else ()
    if isinstance(value, list):
        entries = enumerate(value)
    for key, entry in entries:
        yield from _placeholders(entry, at(path, key))


def _task(config: Mapping[str, Any]) -> Iterator[str]:
    for key in ("name", "num_epochs", "loss", "dataset", "model", "optimizer"):
        if key not in config:
            yield missing_key(ROOT, key, _unknown(config))
    if "meters" not in config:
        yield missing_key(
            ROOT, "meters", _unknown(config), 'write {"accuracy": {"topk": [1]}}, or {} for none'
        )
    for key in _unknown(config):
        if key in OLD_FLAGS:
            yield f"{at(ROOT, key)}: is no key of a task but an old command-line flag: {OLD_FLAGS[key]}"
        elif config.get("name") in ("classification_task", "fine_tuning"):
            yield unknown_key(ROOT, key, _task_keys(config))
    yield from _values(config, ROOT, _TASK_VALUES)
    if config.get("name") == "fine_tuning" and not config.get("pretrained_checkpoint"):
        yield missing_key(ROOT, "pretrained_checkpoint", config, "fine_tuning starts from a trained model")
    if config.get("amp_args"):
        yield (
            f"{at(ROOT, 'amp_args')}: apex and float16 are not supported (and never were without CUDA): "
            "remove amp_args and set training.elastic.precision: bf16"
        )
    yield from _distributed(config)


def _task_keys(config: Mapping[str, Any]) -> frozenset[str]:
    return TASK_KEYS | FINE_TUNING_KEYS if config.get("name") == "fine_tuning" else TASK_KEYS


def _unknown(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in _task_keys(config)}


def _distributed(config: Mapping[str, Any]) -> Iterator[str]:
    section, path = config.get("distributed"), at(ROOT, "distributed")
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield wrong_value(path, section, "a mapping")
        return
    for key in section:
        if key not in DISTRIBUTED_KEYS:
            yield unknown_key(path, key, DISTRIBUTED_KEYS)
    mode = section.get("batch_norm_sync_mode", "disabled")
    if str(mode).lower() != "disabled":
        yield (
            f"{at(path, 'batch_norm_sync_mode')}: is {mode!r}: synchronised BatchNorm would tie the model to "
            "the world size; remove it, statistics are taken over fixed shards and are the same on all ranks"
        )
    if section.get("fp16_grad_compress"):
        yield f"{at(path, 'fp16_grad_compress')}: gradients are summed as they are; remove it"


def _data(config: Mapping[str, Any], base: Path) -> Iterator[str]:
    data, path = config.get("dataset"), at(ROOT, "dataset")
    if data is None:
        return
    if not isinstance(data, Mapping):
        yield wrong_value(path, data, 'a mapping with "train" and "test"')
        return
    for phase in data:
        if phase not in ("train", "test"):
            yield unknown_key(path, phase, ("train", "test"))
    if not data.get("train"):
        yield missing_key(path, "train", data)
    if "test" not in data:
        yield missing_key(path, "test", data, "nothing would be evaluated; write null if that is meant")
    for phase in ("train", "test"):
        if isinstance(data.get(phase), Mapping):
            yield from _data_section(data[phase], at(path, phase), base)


def _data_section(section: Mapping[str, Any], path: str, base: Path) -> Iterator[str]:
    name = section.get("name")
    if name in _VIDEO:
        yield (
            f"{at(path, 'name')}: {name!r} cannot be read: torchvision no longer decodes video; "
            "use image_folder on extracted frames"
        )
        return
    if name is None:
        yield missing_key(path, "name", section)
    if "batchsize_per_replica" not in section:
        yield missing_key(path, "batchsize_per_replica", section)
    yield from _values(section, path, _DATA_VALUES)
    if section.get("download"):
        yield f"{at(path, 'download')}: every worker would download: unpack the data in root and remove this"
    if "phases_per_epoch" in section:
        yield f"{at(path, 'phases_per_epoch')}: Classy Vision's data sets ignore it: remove it"
    yield from _paths(section, path, base)


def _paths(section: Mapping[str, Any], path: str, base: Path) -> Iterator[str]:
    name = str(section.get("name"))
    for key in _PATH_KEYS.get(name, ()):
        if not section.get(key):
            yield missing_key(path, key, section, "give the directory of the images")
    if name == "image_path" and section.get("image_files"):
        yield (
            f"{at(path, 'image_files')}: these images have no labels: use image_folder, a directory a class"
        )
    for key in _PATHS_ANYWHERE:
        value = section.get(key)
        if not isinstance(value, str) or _PLACEHOLDER.search(value):
            continue
        if value == "" or not (base / value).exists():
            yield f"{at(path, key)}: {value!r} does not exist; give the directory of the data"


def _parts(config: Mapping[str, Any]) -> Iterator[str]:
    for part in ("loss", "model", "optimizer"):
        section = config.get(part)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            yield wrong_value(at(ROOT, part), section, "a mapping with a name")
        elif "name" not in section:
            yield missing_key(at(ROOT, part), "name", section)
    loss = config.get("loss")
    if isinstance(loss, Mapping) and loss.get("reduction", "mean") != "mean":
        yield (
            f"{at(ROOT, 'loss', 'reduction')}: is {loss['reduction']!r}; it must be 'mean': "
            "shards are weighted by their samples"
        )
    yield from _optimizer(config.get("optimizer"))
    yield from _meters(config.get("meters"))
    yield from _mixup(config.get("mixup"))


def _optimizer(section: Any) -> Iterator[str]:
    if not isinstance(section, Mapping):
        return
    path = at(ROOT, "optimizer")
    for key in ("lr", "momentum", "weight_decay", "eps", "alpha"):
        if key in section and not _is_number(section[key]):
            yield wrong_value(at(path, key), section[key], "a number of at least 0")
    schedulers = section.get("param_schedulers")
    if schedulers is None and "lr" not in section:
        yield missing_key(
            path,
            "param_schedulers",
            section,
            "without it the learning rate is a default; give it, or give lr",
        )
    elif schedulers is not None and not isinstance(schedulers, Mapping):
        yield wrong_value(
            at(path, "param_schedulers"), schedulers, 'a mapping like {"lr": {"name": "cosine", …}}'
        )


def _meters(section: Any) -> Iterator[str]:
    path = at(ROOT, "meters")
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield wrong_value(path, section, 'a mapping like {"accuracy": {"topk": [1, 5]}}')
        return
    for name in ("accuracy", "precision_at_k", "recall_at_k"):
        meter = section.get(name)
        if meter is None:
            continue
        if not isinstance(meter, Mapping):
            yield wrong_value(at(path, name), meter, 'a mapping like {"topk": [1, 5]}')
            continue
        for key in meter:
            if key != "topk":
                yield unknown_key(at(path, name), key, ("topk",))
        topk = meter.get("topk")
        if not isinstance(topk, list) or not topk or not all(_is_count(k) for k in topk):
            yield wrong_value(at(path, name, "topk"), topk, "a list of whole numbers of at least 1")


def _mixup(section: Any) -> Iterator[str]:
    path = at(ROOT, "mixup")
    if section is None:
        return
    if not isinstance(section, Mapping):
        yield wrong_value(path, section, "a mapping")
        return
    for key in section:
        if key not in MIXUP_KEYS:
            yield unknown_key(path, key, MIXUP_KEYS)
    for key in ("alpha", "num_classes"):
        if key not in section:
            yield missing_key(path, key, section)


# ---- values ------------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value >= 0


_Check = tuple[Callable[[Any], bool], str]
_COUNT: Final[_Check] = (_is_count, "a whole number of at least 1")
_FLAG: Final[_Check] = (lambda value: isinstance(value, bool), "true or false")

_TASK_VALUES: Final[Mapping[str, _Check]] = {
    "num_epochs": _COUNT,
    "test_phase_period": _COUNT,
    "test_only": (lambda value: value is False, "false: a job trains; use load_exported to evaluate a model"),
    "use_sharded_ddp": (lambda value: value is False, "false: the elastic trainer sums gradients itself"),
    "bn_weight_decay": _FLAG,
    "clip_grad_norm": (lambda value: value is None or (_is_number(value) and value > 0), "a number over 0"),
    "simulated_global_batchsize": (lambda value: value is None or _is_count(value), _COUNT[1]),
    "use_gpu": (lambda value: value is None or isinstance(value, bool), "true or false"),
    "reset_heads": _FLAG,
    "freeze_trunk": _FLAG,
    "name": (lambda value: isinstance(value, str), "the name of a task"),
}
_DATA_VALUES: Final[Mapping[str, _Check]] = {
    "batchsize_per_replica": _COUNT,
    "use_shuffle": (lambda value: value is None or isinstance(value, bool), "true or false"),
    "num_samples": (lambda value: value is None or _is_count(value), "null or a whole number of at least 1"),
    "num_workers": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value >= 0,
        "a whole number of at least 0",
    ),
    "transforms": (
        lambda value: (
            value is None or (isinstance(value, list) and all(isinstance(one, Mapping) for one in value))
        ),
        "a list of mappings with a name",
    ),
}


def _values(section: Mapping[str, Any], path: str, checks: Mapping[str, _Check]) -> Iterator[str]:
    for key, (is_good, allowed) in checks.items():
        if key in section and not is_good(section[key]):
            yield wrong_value(at(path, key), section[key], allowed)
