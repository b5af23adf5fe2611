"""One bad input: the files it needs, the command that meets it, and the exact message."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

MODEL = [
    "num_layers=2",
    "hidden_size=32",
    "num_attention_heads=4",
    "seq_length=64",
    "tokenizer_type=CharLevelTokenizer",
]
TRAIN = ["train.py", *MODEL, "train_iters=4", "eval_interval=0", "data_path={corpus}", "save=run"]
"""A training that would run if the words added to it were good."""


@dataclass(frozen=True)
class Case:
    """A command that must end with one message and lose nothing.

    It runs in an empty folder. In words and message {corpus} is the prefix of a small corpus and
    {trained} the folder of a run with a checkpoint of step 4; {here} is the empty folder itself.
    The message is a part of what stderr holds, word for word; it names the place and the fault.

    words: the script and its arguments
    files: files of the folder, by name; text is written in UTF-8
    prepare: what else the folder needs; it may change {here}/copy if `copies_run` is set
    copies_run: puts a copy of the run into {here}/copy
    """

    name: str
    words: list[str]
    message: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], None] | None = None
    copies_run: bool = False
    status: int = 1
