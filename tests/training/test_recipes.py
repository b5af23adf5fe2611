"""docs/recipes.md is carried out with small sizes, and every recipe loads over a model."""

import re
import shutil
from pathlib import Path

import pytest

from deepy import checked_config
from megatron.checkpoints.manifest import read_record
from megatron.config import load
from megatron.entry import split_words
from megatron.training.loop import train
from tests.checkpoints import make_checkpoint
from tests.support import ROOT, call

GUIDE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
COMMANDS = [
    line
    for block in re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
    for line in block.splitlines()
]
TRAINING = [line for line in COMMANDS if line.startswith("python deepy.py train.py ")]
RECIPES = sorted((ROOT / "configs" / "recipes").glob("*.yml"))
SHAPE = ["num_layers=1", "hidden_size=48", "num_attention_heads=12"]


@pytest.fixture(scope="module")
def project(corpus, tmp_path_factory) -> Path:
    """A user's folder: the project's files and runs/rotary, a model of 125M.yml in small."""
    folder = tmp_path_factory.mktemp("recipes")
    for name in ("train.py", "evaluate.py", "deepy.py", "configs"):
        (folder / name).symlink_to(ROOT / name)
    make_checkpoint(
        folder / "runs" / "rotary",
        corpus,
        *SHAPE,
        "seq_length=512",
        "train_iters=50000",
        "optimizer.params.lr=0.0006",
    )
    return folder


def small(corpus: Path) -> list[str]:
    """What is laid over a command of the guide, so that it takes a second."""
    data = [f"data_path={corpus}", "tokenizer_type=CharLevelTokenizer", "split=8,1,1"]
    files = ["vocab_file=null", "merge_file=null"]
    batch = ["train_micro_batch_size_per_gpu=1", "train_batch_size=1", "eval_interval=0"]
    return [*SHAPE, *data, *files, *batch, "precision=fp32", "zero_optimization.stage=0"]


@pytest.mark.parametrize("line", TRAINING, ids=lambda line: line.split("save=")[1].split()[0])
def test_the_guides_trainings_run(line, project, corpus, grid, monkeypatch):
    monkeypatch.chdir(project)
    words = [*line.split()[3:], *small(corpus)]
    assert checked_config(ROOT / "train.py", words) is not None
    files, overrides = split_words(words)
    shorter = ["train_iters=6", "lr_decay_iters=6", "no_load_optim=true"]
    if "finetune" in line or "recipes/" in line:
        shorter = ["train_iters=1", "lr_decay_iters=1"]
    config = load(files, [*overrides, *shorter])
    config.require_for("train")
    saved = train(config, grid)
    assert saved == Path(config["save"]) / f"global_step{config.training.train_iters}"
    if config.checkpoint.finetune:
        assert read_record(saved)["parent"]["path"] == "runs/rotary/global_step5"


def test_the_guides_evaluation_runs(project, corpus, monkeypatch):
    monkeypatch.chdir(project)
    shutil.rmtree(project / "runs" / "drope", ignore_errors=True)
    make_checkpoint(project / "runs" / "drope", corpus, *SHAPE, "pos_emb=none", step=1)
    (line,) = [line for line in COMMANDS if line.startswith("python evaluate.py ")]
    done = call(*line.split()[1:], "eval_tokens=4096")
    assert done.returncode == 0, done.stderr
    assert re.search(r"none +\S", done.stdout), done.stdout


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_loads_over_a_model_and_is_in_the_guide(path):
    config = load([ROOT / "configs/125M.yml", path], ["save=a", "load=b", "data_path=c"])
    assert config.notes == ()
    assert config.checkpoint.finetune
    assert f"`{path.name}`" in GUIDE
    config.require_for("train")
