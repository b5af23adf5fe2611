"""docs/recipes.md: its trainings are configurations that load, and every recipe is in it."""

import re
import shlex

import pytest
import torch

from megatron.config import load
from megatron.entry import split_words
from megatron.model import positions_from_config
from tests.support import ROOT

GUIDE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yml"))


def test_the_guides_trainings_are_complete_configurations(monkeypatch):
    monkeypatch.chdir(ROOT)
    trainings = [line for line in COMMANDS if line.startswith("python deepy.py train.py ")]
    assert len(trainings) > 5
    for line in trainings:
        files, overrides = split_words(shlex.split(line)[3:])
        load(files, [*overrides, "data_path=c"]).require_for("train")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_over_a_model_and_is_in_the_guide(path):
    config = load([ROOT / "configs/125M.yml", path], ["save=a", "load=b", "data_path=c"])
    assert config.notes == ()
    assert config.checkpoint.finetune
    assert f"`{path.name}`" in GUIDE
    config.require_for("train")
    is_stretched = bool(config["pos_emb"] == "rotary" and config["pos_emb_args"])
    assert is_stretched == (config["optimizer"].params.lr < 6e-4), "a rate of its own"


def test_longropes_recipe_has_the_frequencies_of_ntk():
    frequencies = []
    for name in ("ntk", "longrope"):
        files = [ROOT / f"configs/{stem}.yml" for stem in ("125M", f"recipes/{name}")]
        [position, *_], _ = positions_from_config(load(files))
        frequencies.append(position.inv_freq)
    torch.testing.assert_close(*frequencies, rtol=1e-3, atol=0)
