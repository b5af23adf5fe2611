"""The README's commands and its example run, in a clone, with small sizes."""

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
import zstandard
from tokenizers import ByteLevelBPETokenizer

from megatron.config import load
from megatron.model import from_config
from megatron.positions import REGISTRY
from megatron.results.files import read_results
from megatron.results.table import table
from tests.support import ROOT, make_texts, modules
from tools.document_commands import make_clone

README = (ROOT / "README.md").read_text(encoding="utf-8")
# What is appended to a command, so that it takes seconds: the last word wins.
SMALL_MODEL = ["num_layers=1", "hidden_size=24", "num_attention_heads=12", "precision=fp32"]
SMALLER = {
    "train.py": [
        "train_iters=2",
        "lr_decay_iters=2",
        "train_batch_size=1",
        "train_micro_batch_size_per_gpu=1",
    ],
    "evaluate.py": ["eval_tokens=1024", "eval_lengths=512,1024"],
    "probe.py": ["--trials", "2", "--depths", "2"],
}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[str]:
    """Every command of the README, without its comment."""
    lines = "".join(blocks("sh")).splitlines()
    return [re.split(r"  #|   ", line)[0].strip() for line in lines if line]


@pytest.fixture(scope="module")
def clone(tmp_path_factory, forks) -> Path:
    """A clone with small data where the README's user has put or made large ones."""
    folder = tmp_path_factory.mktemp("readme")
    make_clone(folder)
    texts = modules()
    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(texts, vocab_size=600, show_progress=False, special_tokens=special)
    for name in ("data", "demo"):
        (folder / name).mkdir()
    bpe.save_model(str(folder / "data"), "gpt2")
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    (folder / "openwebtext2.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    results = (ROOT / "docs" / "demo.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("mep_free", "rotary"):  # make demo's results
        named = [line for line in results if f'"{name}"' in line]
        (folder / "demo" / f"{name}.jsonl").write_text("".join(named))
    make_texts(folder / "texts")  # in place of make demo's packages
    words = "--input texts --name pure_python -t HFTokenizer --vocab-size 600 -d demo/data"
    succeed(forks, folder, f"python prepare_data.py {words}")
    return folder


def succeed(forks, clone: Path, command: str, more: Sequence[str] = ()) -> str:
    """What a command of the README prints, cut down by `more`."""
    python, *words = shlex.split(command)
    assert python == "python", command
    if words[0] == "deepy.py" and "configs/mep.yml" not in words:
        del words[0]  # it starts a new Python, whose imports take seconds
    done = forks.run(*words, *more, cwd=clone, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_readmes_commands_run_in_their_order(clone, forks):
    makefile = (ROOT / "Makefile").read_text()
    for command in commands():
        if command.startswith(("git clone ", "export PIP_")):  # they need a network
            continue
        if command.startswith("make "):
            assert f"\n{command.split()[1]}:" in makefile, command
            continue
        size = next((words for script, words in SMALLER.items() if script in command), [])
        if "configs/" in command and "demo.yml" not in command and size:
            size = [*size, *SMALL_MODEL]
        output = succeed(forks, clone, command, size)
        if "evaluate.py" in command:
            assert re.search(r"512\*\s+1024", output), output
    assert (clone / "runs" / "mep" / "global_step2" / "model.safetensors").exists()


def test_the_readmes_encoding_and_mixture_work(clone, forks):
    for number, block in enumerate(blocks("yaml")):
        (clone / f"block{number}.yml").write_text(block)
        assert from_config(load([ROOT / "configs/demo.yml", clone / f"block{number}.yml"]), 100)
    (example,) = blocks("python")
    (clone / "bump.py").write_text(example)
    words = [*SMALLER["train.py"], "eval_interval=0", "pos_emb_file=bump.py"]
    train = "python train.py configs/demo.yml pos_emb=bump save=runs/bump"
    assert " 4 of them in the encoding" in succeed(forks, clone, train, words)
    measure = "python evaluate.py --checkpoint runs/bump --lengths 512 1024 eval_tokens=4096"
    assert "bump" in succeed(forks, clone, measure, ["pos_emb_file=bump.py"])


def test_the_readmes_table_is_the_measured_one():
    rows = read_results([ROOT / "docs" / "demo.jsonl"])
    _, grid, *_ = table(rows, markdown=True).split("\n\n")
    assert grid in README
    assert [name for name in REGISTRY if not re.search(rf"[` ]{name}[` \n]", README)] == []
