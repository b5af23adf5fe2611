"""docs/recipes.md is carried out with small sizes, and every recipe loads over a model."""

import os
import re
import shutil
import statistics
from pathlib import Path

import pytest

from deepy import checked_config
from megatron.checkpoints.manifest import read_record
from megatron.checkpoints.saved import latest_step, with_parent
from megatron.config import load
from megatron.entry import split_words
from megatron.results.files import read_results
from megatron.sweeps.cells import load_sweep
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


def test_the_table_of_the_results_is_the_measured_one():
    folder = ROOT / "docs" / "results"
    measured: dict[str, dict[int, list[float]]] = {}
    for row in read_results([folder / "continued.jsonl"]):
        recipe = row["cell"]["recipe"] if "cell" in row else "the parent"
        assert row.get("parent_model") == (None if recipe == "the parent" else "rotary step 700")
        measured.setdefault(recipe, {}).setdefault(row["length"], []).append(row["perplexity"])
    page = (folder / "continued.md").read_text(encoding="utf-8")
    assert len(measured) == 6
    for recipe, by_length in measured.items():
        cells = []
        for length in (512, 1024, 2048, 4096):
            values = by_length[length]
            spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            cells.append(f"{statistics.mean(values):.2f}{spread}")
        assert f"| {recipe} | {len(by_length[512])} | {' | '.join(cells)} |" in page


def test_the_sweep_of_the_results_has_its_parent_from_the_demo(tmp_path, corpus, monkeypatch):
    shape = ["num_layers=4", "hidden_size=128", "num_attention_heads=4", "seq_length=512"]
    make_checkpoint(tmp_path / "demo" / "rotary", corpus, *shape, step=700)
    for name in ("configs", "docs"):
        os.symlink(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    sweep = load_sweep("docs/results/continued.yml", "runs/continued")
    assert not sweep.broken
    assert len(sweep.cells) == 15
    for cell in sweep.cells:
        assert cell.config["load"] == "demo/rotary/global_step700"
        assert with_parent(cell.config).hash == cell.config.hash
        assert latest_step(cell.folder) is None
