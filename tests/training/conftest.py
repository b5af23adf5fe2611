"""One process in a DeepSpeed engine, and settings of a model of seconds."""

import os

import pytest

from megatron.parallel.grid import Grid, connect
from tests.support import LAUNCHED


@pytest.fixture(scope="session")
def grid() -> Grid:
    """This process alone; what connect() tells a launched process is not passed on to the tests' subprocesses."""
    found = connect()
    for name in LAUNCHED:
        if name != "LOCAL_RANK":  # DeepSpeed asks for it whenever an engine is built
            os.environ.pop(name, None)
    return found


def tiny(*more: str) -> list[str]:
    """Overrides for a model of two small layers."""
    shape = ["num_layers=2", "hidden_size=32", "num_attention_heads=4", "seq_length=64"]
    recipe = [
        "train_micro_batch_size_per_gpu=4",
        "optimizer.params.lr=3e-3",
        "eval_interval=0",
        "log_interval=1",
    ]
    return [*shape, *recipe, "tokenizer_type=CharLevelTokenizer", *more]
