"""A checkpoint of random weights, for tests of what reads checkpoints."""

from pathlib import Path

from megatron.checkpoints.write import write_checkpoint
from megatron.config import load
from megatron.data.parts import open_parts
from megatron.model import from_config, padded_vocab


def checkpoint_of_bytes(run: Path, *settings: str) -> tuple[Path, str]:
    """A checkpoint of random weights at step 10 whose ids are bytes, and its config hash."""
    config = load([], [*settings, "tokenizer_type=CharLevelTokenizer", f"save={run}"])
    weights = from_config(config, vocab=512).state_dict()
    return write_checkpoint(run, 10, weights, config, {"vocab": 512}), config.hash


def make_checkpoint(folder: Path, corpus: Path | str, *settings: str, step: int = 5) -> Path:
    """A run's folder with one checkpoint of random weights; corpus: a prefix or a task."""
    shape = [
        "num_layers=2",
        "hidden_size=32",
        "num_attention_heads=4",
        "seq_length=64",
        f"data_path={corpus}",
    ]
    config = load([], [*shape, "split=8,1,1", "eval_tokens=512", *settings])
    tokenizer = open_parts(config.data, ["train"])["train"].files[0].meta["tokenizer"]
    vocab = padded_vocab(tokenizer["vocab_size"], 128)
    weights = from_config(config, vocab=vocab).state_dict()
    write_checkpoint(folder, step, weights, config, {"vocab": vocab, "tokenizer": tokenizer})
    return folder
