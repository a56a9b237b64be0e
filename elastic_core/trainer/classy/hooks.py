"""The hooks of a config: which are run, which are done anyway, and which are refused, with the reason.

Light: neither torch nor Classy Vision is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from elastic_core.trainer.classy.problems import ROOT, at, missing_key, unknown_key, wrong_value

EMA: Final = "ema_model_weights"
PRECISE_BN: Final = "precise_bn"
TENSORBOARD: Final = "tensorboard_plot"
PROFILER: Final = "profiler"

DONE_ANYWAY: Final = {
    "loss_lr_meter_logging": "loss, learning rate and meters are told and written to metrics.jsonl",
    "progress_bar": "progress is told",
    "model_complexity": "the check of the config tells parameters and operations",
}
"""Hooks whose work the product does by itself: they may stay in a config."""

_REFUSED: Final = {
    "checkpoint": "remove it: the job's checkpoint section writes checkpoints, atomically",
    "model_tensorboard": "remove it: it would trace the model on every rank at every start",
    "visdom": "remove it: use tensorboard_plot, or metrics.jsonl and the run's report",
    "output_csv": "remove it: use load_exported on the trained model",
    "torchscript": "remove it: the trained model is exported at the end",
}

_Check = tuple[Callable[[Any], bool], str]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_COUNT: Final[_Check] = (_is_count, "a whole number of at least 1")
_ANY: Final[_Check] = (lambda _: True, "")

RUN: Final[Mapping[str, Mapping[str, _Check]]] = {
    EMA: {
        "decay": (lambda value: _is_number(value) and 0 <= value <= 1, "a number from 0 to 1"),
        "consider_bn_buffers": (lambda value: isinstance(value, bool), "true or false"),
        "device": _ANY,
    },
    PRECISE_BN: {
        "num_samples": _COUNT,
        "cache_samples": (lambda value: isinstance(value, bool), "true or false"),
    },
    TENSORBOARD: {"log_period": _COUNT},
    PROFILER: {
        "first_step": (lambda value: _is_count(value, 0), "a whole number of at least 0"),
        "steps": (lambda value: _is_count(value) and value <= 100, "a whole number from 1 to 100"),
    },
}
"""Hooks that are run, with their keys."""

_REQUIRED: Final = {EMA: ("decay",), PRECISE_BN: ("num_samples",)}


def settings_of(config: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return the section of a hook, None if the config has no such hook."""
    return next((hook for hook in config.get("hooks") or () if hook["name"] == name), None)


def find_hook_problems(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield every mistake in the hooks of a config."""
    hooks, path = config.get("hooks"), at(ROOT, "hooks")
    if hooks is None:
        return
    if not isinstance(hooks, list):
        yield wrong_value(path, hooks, 'a list like [{"name": "ema_model_weights", "decay": 0.999}]')
        return
    names = []
    for number, hook in enumerate(hooks):
        name = hook.get("name") if isinstance(hook, Mapping) else None
        yield from _problems_of(hook, name, at(path, number))
        if name in RUN and name in names:
            yield f"{at(path, number)}: there is a hook {name!r} already: remove one"
        names.append(name)
    if EMA in names and PRECISE_BN in names:
        yield (
            f"{path}: precise_bn would leave the averaged weights of ema_model_weights with statistics of "
            "others: remove one of the two"
        )


def _problems_of(hook: Any, name: Any, path: str) -> Iterator[str]:
    if name in DONE_ANYWAY:
        return
    if name in _REFUSED:
        yield f"{at(path, 'name')}: hook {name!r} is not run: {_REFUSED[name]}"
    elif name not in RUN:
        yield (
            f"{at(path, 'name')}: hook {name!r} is not supported; allowed: "
            f"{', '.join(sorted([*RUN, *DONE_ANYWAY]))} (a hook of your own would see one rank's shards, not "
            "the step)"
        )
    else:
        yield from _keys(hook, RUN[name], path, _REQUIRED.get(name, ()))


def _keys(
    hook: Mapping[str, Any], checks: Mapping[str, _Check], path: str, required: tuple[str, ...]
) -> Iterator[str]:
    for key in hook:
        if key == "name":
            continue
        if key == "tb_writer":
            yield f"{at(path, key)}: curves are written into the run's directory, at every start: remove it"
        elif key not in checks:
            yield unknown_key(path, key, {"name", *checks})
        elif not checks[key][0](hook[key]):
            yield wrong_value(at(path, key), hook[key], checks[key][1])
    for key in required:
        if key not in hook:
            yield missing_key(path, key, hook)
