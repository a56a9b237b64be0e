"""What becomes of every config that Classy Vision 0.7.0 ships: trained as it is, or refused, and why.

    python -m benchmarks.classy_configs [--json PATH|-] [--only WORD] [--update]

Each config is checked as it ships. Where only its data (or its pretrained model) are missing, it is
checked and trained once more with what the table names in their place: a few images of 64 pixels.
`--update` writes the table into docs/classy.md.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from rich.console import Console
from rich.table import Table

from elastic_core.model.job import JobSpec
from elastic_core.trainer.classy.compat import build_model
from elastic_core.trainer.classy.solo import SoloReducer
from elastic_core.trainer.classy.validate import validate_training
from elastic_core.trainer.classy.worker import build_trainee

PAGE: Final = Path(__file__).parents[1] / "docs" / "classy.md"
BEGIN: Final = "<!-- begin: python -m benchmarks.classy_configs --update -->"
END: Final = "<!-- end -->"

STEPS: Final = 3
BATCH: Final = 4
PIXELS: Final = 64
FRAMES: Final = 4

_MISSING: Final = (
    "does not exist; give the directory",
    "fine_tuning starts from",
    "set training.user_package",
)
"""Words of the problems that data, a pretrained model or the template's own code mend."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One config.

    Attributes:
        config: Its path within the package.
        as_shipped: "trains", or the first problem.
        replaced: What was put in the place of what is missing.
        outcome: What became of it then; "" if nothing can be put there.
    """

    config: str
    as_shipped: str
    replaced: tuple[str, ...]
    outcome: str


def shipped() -> list[Path]:
    """Return every JSON config of the installed Classy Vision, relative to its package."""
    root = package()
    return sorted(
        path.relative_to(root)
        for path in root.rglob("*.json")
        if path.parent.name == "configs" or "configs" in path.relative_to(root).parts
    )


def package() -> Path:
    """Return the directory of the installed Classy Vision."""
    import classy_vision

    return Path(classy_vision.__file__).parent


def try_config(relative: Path, scratch: Path) -> Outcome:
    """Check a config as it ships, and train it if that, or what can be replaced, allows it."""
    path = package() / relative
    config = json.loads(path.read_text())
    is_synthetic = str(config["dataset"]["train"]["name"]).startswith("synthetic")
    problems = validate_training(_job(config, elastic=(0, 1)), path.parent)
    if not all(map(_is_mended, problems)):
        return Outcome(str(relative), _short(problems), (), "")
    stand_in = _StandIn(config, scratch)
    replaced = stand_in.replace()
    packages = _template_packages(path) if "template" in relative.parts[0] else ""
    job = _job(stand_in.config, elastic=(BATCH, 2), packages=packages)
    as_shipped = "trains" if is_synthetic and not problems else _short(problems)
    left = validate_training(job, path.parent)
    return Outcome(str(relative), as_shipped, replaced, f"refused: {left[0]}" if left else _train(job))


def _job(config: Mapping[str, Any], *, elastic: tuple[int, int], packages: str = "") -> JobSpec:
    batch, shards = elastic
    training = {"kind": "classy", "config": dict(config), "user_package": packages}
    nodes = {"min": 1, "target": 1, "max": 1}
    options = {"global_batch": batch, "virtual_shards": shards}
    return JobSpec.model_validate({"nodes": nodes, "training": {**training, "elastic": options}})


def _is_mended(problem: str) -> bool:
    return any(words in problem for words in _MISSING)


def _short(problems: list[str]) -> str:
    """Return the first problem, of those that nothing mends if there are any, and how many more there are."""
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    problems = sorted(problems, key=_is_mended)
    first = re.sub(r"known: [^;]*; ", "", problems[0].removeprefix("training.config."))
    return f"refused: {first}{more}"


def _template_packages(path: Path) -> str:
    sys.path.insert(0, str(path.parents[1]))
    return "datasets, losses, models"


def _train(job: JobSpec) -> str:
    """Train a few steps as a worker alone would, evaluate, and say what came out."""
    trainee, alone = build_trainee(job, Path.cwd()), SoloReducer()
    trainee.set_up()
    losses = [trainee.train_step(alone).metrics["loss"] for _ in range(STEPS)]
    trainee.evaluate(alone)
    parameters = sum(parameter.numel() for parameter in trainee.parameters().values())
    return f"trains: {len(losses)} steps, {parameters:,} trained parameters, evaluated"


class _StandIn:
    """A config with small data in the place of those that nobody has at hand."""

    def __init__(self, config: Mapping[str, Any], scratch: Path) -> None:
        self.config: dict[str, Any] = copy.deepcopy(dict(config))
        self._scratch = scratch

    def replace(self) -> tuple[str, ...]:
        """Put small data into the config and return what was changed, in words."""
        return (*self._data(), *self._head_pool(), *self._pretrained())

    def _data(self) -> Iterator[str]:
        kind = str(self.config["dataset"]["train"]["name"])
        for phase, section in self.config["dataset"].items():
            section |= {"batchsize_per_replica": 2, "num_workers": 0, "num_samples": None}
            if kind == "image_path":
                section["image_folder"] = str(_write_images(self._scratch, phase))
                _shrink(section["transforms"])
            else:
                section["num_samples"] = STEPS * BATCH if phase == "train" else BATCH
            if kind == "synthetic_image":
                section["crop_size"] = PIXELS
            if kind == "synthetic_video":
                section |= {"frames_per_clip": FRAMES, "video_height": PIXELS, "video_width": PIXELS}
        what = f"{STEPS * BATCH} {f'clips of {FRAMES} frames' if kind == 'synthetic_video' else 'images'}"
        yield (
            f"{what} of {PIXELS} px" if kind != "my_dataset" else f"{STEPS * BATCH} images, its own packages"
        )

    def _head_pool(self) -> Iterator[str]:
        """A head that pools over a fixed size is made for full-size images: let it follow them."""
        model = self.config["model"]
        for head in model.get("heads", ()):
            if "pool_size" in head:
                model["clip_crop_size"] = PIXELS
                halvings = 1 + int(model["stem_maxpool"]) + model["stage_spatial_stride"].count(2)
                side = PIXELS // 2**halvings
                head["pool_size"] = [1, side, side]
                yield f"the head's `pool_size`: {head['pool_size']}"

    def _pretrained(self) -> Iterator[str]:
        if self.config["name"] == "fine_tuning":
            path = self._scratch / "pretrained.pt"
            model = build_model(self.config["model"]).get_classy_state()
            torch.save({"classy_state_dict": {"base_model": model}}, path)
            self.config["pretrained_checkpoint"] = str(path)
            yield "a checkpoint of its model"


def _shrink(transforms: list[dict[str, Any]]) -> None:
    for transform in transforms:
        _shrink(transform.get("transforms", []))
        if "size" in transform:
            transform["size"] = PIXELS + 8 if transform["name"] == "Resize" else PIXELS


def _write_images(scratch: Path, phase: str) -> Path:
    """Write a tree of random images, two classes, and return its root."""
    root = scratch / phase
    generator = np.random.default_rng(0)
    for number in range(STEPS * BATCH if phase == "train" else BATCH):
        place = root / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = generator.integers(0, 256, (PIXELS, PIXELS, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number}.png")
    return root


def markdown(outcomes: list[Outcome]) -> str:
    """Return the table as the page has it."""
    lines = ["| config | as it ships | replaced | then |", "|---|---|---|---|"]
    lines += [
        f"| `{one.config}` | {one.as_shipped} | {'; '.join(one.replaced) or '-'} | {one.outcome or '-'} |"
        for one in outcomes
    ]
    return "\n".join(lines)


def in_page(text: str, outcomes: list[Outcome]) -> str:
    """Return the page's text with the table in its place."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{markdown(outcomes)}\n{END}{after}"


def main() -> None:
    """Try all configs and tell."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", default="", metavar="PATH|-", help="also write JSON")
    parser.add_argument("--only", default="", metavar="WORD", help="only configs whose path has it")
    parser.add_argument("--update", action="store_true", help="write the table into docs/classy.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    outcomes = []
    for relative in shipped():
        if arguments.only in str(relative):
            with tempfile.TemporaryDirectory() as scratch:
                outcomes.append(try_config(relative, Path(scratch)))
            sys.stderr.write(f"{relative}: {outcomes[-1].outcome or outcomes[-1].as_shipped}\n")
    _tell(outcomes, arguments.json)
    if arguments.update:
        PAGE.write_text(in_page(PAGE.read_text(), outcomes))


def _tell(outcomes: list[Outcome], json_path: str) -> None:
    table = Table("config", "as it ships", "replaced", "then")
    for one in outcomes:
        table.add_row(one.config, one.as_shipped, "; ".join(one.replaced), one.outcome)
    Console(stderr=json_path == "-").print(table)
    text = json.dumps([asdict(one) for one in outcomes], indent=2)
    if json_path == "-":
        sys.stdout.write(text + "\n")
    elif json_path:
        Path(json_path).write_text(text + "\n")


if __name__ == "__main__":
    main()
