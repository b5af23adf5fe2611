"""One process in a DeepSpeed engine, and a small real corpus in bytes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.parallel.grid import Grid, connect

ROOT = Path(__file__).parents[2]
LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(scope="session")
def grid() -> Grid:
    """This process alone; what connect() tells a launched process is not passed on to the tests' subprocesses."""
    found = connect()
    for name in LAUNCHED:
        os.environ.pop(name, None)
    return found


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """Prefix of a prepared token file: the text of this project's own modules, in bytes."""
    folder = tmp_path_factory.mktemp("corpus")
    for number, path in enumerate(sorted((ROOT / "megatron").rglob("*.py"))):
        (folder / f"{number:03}.txt").write_text(path.read_text())
    command = [sys.executable, "prepare_data.py", "--input", folder, "--name", "tiny", "-t", "CharLevelTokenizer"]
    subprocess.run([*command, "-d", folder / "data"], cwd=ROOT, check=True, capture_output=True)
    return folder / "data" / "tiny" / "tiny_text_document"


def tiny(*more: str) -> list[str]:
    """Overrides for a model of two small layers."""
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    recipe = ["train_micro_batch_size_per_gpu=4", "optimizer.params.lr=3e-3", "eval_interval=0", "log_interval=1"]
    return [*shape, *recipe, "tokenizer_type=CharLevelTokenizer", *more]
