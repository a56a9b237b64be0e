from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import classy_configs
from benchmarks.classy_configs import PAGE, Outcome, in_page, shipped, try_config


def test_the_page_tells_the_fate_of_every_config_that_ships() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    fates = {cells[0].strip("| `"): (cells[1], cells[3]) for cells in rows if "config" in cells[0]}
    assert set(fates) == {str(path) for path in shipped()}
    assert len(fates) == 21
    for config, (as_shipped, then) in fates.items():
        assert then.startswith("trains: 3 steps") or as_shipped.startswith("refused: "), config


@pytest.mark.parametrize(
    "config", ["configs/ucf101/r3d34.json", "configs/kinetics400/preactivated_i3d50.json"]
)
def test_a_config_whose_data_cannot_be_read_is_refused_as_the_page_says(config: str, tmp_path: Path) -> None:
    outcome = try_config(Path(config), tmp_path)
    assert outcome.outcome == ""
    assert "torchvision no longer decodes video; use image_folder on extracted frames" in outcome.as_shipped
    assert f"| `{config}` | {outcome.as_shipped} |" in PAGE.read_text()


@pytest.mark.slow
def test_a_config_without_its_data_trains_on_small_ones(tmp_path: Path) -> None:
    outcome = try_config(Path("configs/imagenet/densenet121_imagenet_classy_config.json"), tmp_path)
    assert outcome.as_shipped.startswith(
        "refused: dataset.train.image_folder: '/tmp/imagenet/train' does not"
    )
    assert outcome.replaced == ("12 images of 64 px",)
    assert outcome.outcome == "trains: 3 steps, 7,978,856 trained parameters, evaluated"


def test_a_table_replaces_the_old_one_and_nothing_else() -> None:
    text = f"before\n{classy_configs.BEGIN}\nold\n{classy_configs.END}\nafter\n"
    new = in_page(text, [Outcome("a.json", "trains", (), "")])
    assert new.startswith(f"before\n{classy_configs.BEGIN}\n| config |")
    assert "| `a.json` | trains | - | - |" in new
    assert new.endswith(f"{classy_configs.END}\nafter\n")
    assert "old" not in new
