"""One process in a DeepSpeed engine, a model of seconds, and what its runs leave behind."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megatron.config import Config, load
from megatron.model import from_config
from megatron.parallel.grid import Grid, connect
from megatron.training.loop import train
from megatron.training.trainer import Trainer
from tests.support import LAUNCHED, call

VOCAB = 61
MODEL = ["pos_emb=mep_param", "hidden_dropout=0.1"]
SAME = {"loss", "grad_norm", "lr", "position", "tokens", "seq_length"}
"""Numbers of a record that a run repeats."""


@pytest.fixture(scope="session")
def grid() -> Grid:
    """This process alone. Subprocesses of tests do not inherit what connect() sets."""
    alone = connect()
    for name in LAUNCHED:
        if name != "LOCAL_RANK":  # DeepSpeed asks for it whenever an engine is built
            os.environ.pop(name, None)
    return alone


def tiny(*more: str) -> list[str]:
    """Overrides for a model of two small layers; a run may be continued with more steps."""
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    recipe = [
        "train_micro_batch_size_per_gpu=4",
        "optimizer.params.lr=3e-3",
        "eval_interval=0",
        "log_interval=1",
        "override_lr_scheduler=true",
    ]
    return [*shape, *recipe, "tokenizer_type=CharLevelTokenizer", *more]


def settings(corpus: Path, folder: Path, *more: str) -> Config:
    """Eight steps with two checkpoints; the run continues one that the folder holds."""
    paths = [f"data_path={corpus}", f"save={folder}", f"load={folder}"]
    return load([], tiny(*paths, "train_iters=8", "save_interval=4", *MODEL, *more))


def trainer(grid: Grid, *words: str) -> Trainer:
    """The small model in an engine, without a text."""
    config = load([], tiny("train_iters=100", *words))
    return Trainer(config, from_config(config, VOCAB), grid)


def text(count: int, batch: int = 4) -> list[torch.Tensor]:
    """Batches [batch, 65] with something to learn: each token follows from the one before."""
    draw = torch.Generator().manual_seed(0)
    start = torch.randint(VOCAB, (count, batch, 1), generator=draw)
    return list((start + 7 * torch.arange(65)) % VOCAB)


def records(folder: Path, kind: str = "train") -> dict[int, dict]:
    """Records of metrics.jsonl by step."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


@pytest.fixture(scope="session")
def trained(grid, corpus, tmp_path_factory) -> Path:
    """The folder of a run of four steps; not to be changed, see `copy_of`."""
    folder = tmp_path_factory.mktemp("trained")
    train(settings(corpus, folder, "train_iters=4"), grid)
    return folder


def copy_of(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "copy"))


def interrupted(run: Path, step: int, folder: Path) -> Path:
    """A copy of a run that was killed after its checkpoint of that step."""
    shutil.copytree(run, folder)
    for path in folder.glob("global_step*"):
        if int(path.name.removeprefix("global_step")) > step:
            shutil.rmtree(path)
    (folder / "latest").write_text(f"global_step{step}")
    return folder


def check_same(first: Path, second: Path, kind: str = "train") -> None:
    """Records of a kind and weights of the last checkpoint are equal to the last bit.

    Records hold the same numbers, but for those that a clock gives.
    """
    expected, compared = records(first, kind), records(second, kind)
    assert expected.keys() == compared.keys()
    for step, record in expected.items():
        for key in record.keys() & SAME:
            assert record[key] == compared[step][key], (step, key)
    path = Path((first / "latest").read_text()) / "model.safetensors"
    weights = load_file(second / path)
    for name, tensor in load_file(first / path).items():
        assert torch.equal(weights[name], tensor), name


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    """Prefix of 12 documents of letters; documents 3 and 7 have `<`, which is token 60."""
    folder = tmp_path_factory.mktemp("letters")
    lines = []
    for number in range(12):
        text = "the quick brown fox jumps over the lazy dog, and again. " * 4
        if number in (3, 7):
            text = text.replace("fox", "<ox")
        lines.append(json.dumps({"text": text}))
    (folder / "text.jsonl").write_text("\n".join(lines))
    words = ["--input", folder / "text.jsonl", "--name", "x", "-t", "CharLevelTokenizer"]
    done = call("prepare_data.py", *words, "-d", folder)
    assert done.returncode == 0, done.stderr
    return folder / "x" / "x_text_document"
