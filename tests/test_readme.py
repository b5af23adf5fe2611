"""The README's commands and its example run, in a copy of the project, with small sizes."""

import json
import re
import shlex
import shutil
import subprocess
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
from tests.forks import OTHERS, Forks
from tests.support import ROOT, modules

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
    lines = [
        line.split("  #")[0].split("   ")[0].strip()
        for block in blocks("sh")
        for line in block.splitlines()
    ]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """What a clone holds, with small data where the README's user has put or made large ones."""
    folder = tmp_path_factory.mktemp("readme") / "project"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split("\n")
    for name in filter(None, listed):
        if not name.startswith("tests/") and (ROOT / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    make_data(folder)
    return folder


def make_data(folder: Path) -> None:
    texts = modules()
    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>"]
    bpe.train_from_iterator(texts, vocab_size=600, show_progress=False, special_tokens=special)
    for name in ("data", "demo", "texts"):
        (folder / name).mkdir()
    bpe.save_model(str(folder / "data"), "gpt2")
    lines = "".join(json.dumps({"text": text, "meta": {}}) + "\n" for text in texts)
    (folder / "openwebtext2.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    results = (ROOT / "docs" / "demo.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in ("mep_free", "rotary"):  # make demo's results
        of_name = [line for line in results if f'"{name}"' in line]
        (folder / "demo" / f"{name}.jsonl").write_text("".join(of_name))
    for number, text in enumerate(texts):  # those of make demo's corpus: this project's modules
        (folder / "texts" / f"{number:03}.txt").write_text(text)


@pytest.fixture(scope="module")
def forks(project):
    """Starts the scripts of the copy. A test adds a module to it, so its own are not imported."""
    with Forks(project, OTHERS) as forks:
        # make demo's corpus
        words = "--input texts --name stdlib -t HFTokenizer --vocab-size 600 -d demo/data"
        succeed(forks, f"python prepare_data.py {words}")
        yield forks


def succeed(forks: Forks, command: str, more: Sequence[str] = ()) -> str:
    """What a command of the README prints, cut down by `more`."""
    python, *words = shlex.split(command)
    assert python == "python", command
    done = forks.run(*words, *more, timeout=300)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


def test_the_readmes_commands_run_in_their_order(project, forks):
    ran = 0
    for command in commands():
        if command.startswith(("git clone ", "export PIP_")):  # they need a network
            continue
        if command.startswith("make "):
            assert re.search(
                rf"^{command.split()[1]}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE
            ), command
            continue
        size = next((words for script, words in SMALLER.items() if script in command), [])
        if "configs/" in command and "demo.yml" not in command and size:
            size = [*size, *SMALL_MODEL]
        output = succeed(forks, command, size)
        if "evaluate.py" in command:
            assert re.search(r"512\*\s+1024", output), output
        ran += 1
    assert ran >= 5
    assert (project / "runs" / "mep" / "global_step2" / "model.safetensors").exists()


def test_the_readmes_mixture_is_a_configuration(project):
    for number, block in enumerate(blocks("yaml")):
        (project / f"block{number}.yml").write_text(block)
        assert from_config(load([ROOT / "configs/demo.yml", project / f"block{number}.yml"]), 100)


def test_the_readmes_encoding_works_after_dropping_it_in(project, forks):
    (example,) = blocks("python")
    assert len(example.splitlines()) <= 26
    path = project / "megatron" / "positions" / "bump.py"
    path.write_text(example)
    settings = ["pos_emb=bump", "save=runs/bump", *SMALLER["train.py"], "eval_interval=0"]
    trained = succeed(forks, "python train.py configs/demo.yml", settings)
    assert " 4 of them in the encoding" in trained
    measure = "python evaluate.py --checkpoint runs/bump --lengths 512 1024 eval_tokens=4096"
    assert "bump" in succeed(forks, measure)


def test_the_readmes_table_is_the_measured_one():
    rows = read_results([ROOT / "docs" / "demo.jsonl"])
    grid, _ = table(rows, markdown=True).split("\n\n", 1)
    assert grid in README
    assert [name for name in REGISTRY if not re.search(rf"[` ]{name}[` \n]", README)] == []
