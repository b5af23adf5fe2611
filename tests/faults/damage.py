"""Damage to every file of a checkpoint, one at a time, and whether its use notices."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoints.manifest import RECORD
from megatron.checkpoints.read import READ_BY_EVALUATION, load_for_evaluation
from megatron.config import Config, load
from megatron.errors import UserError
from megatron.parallel.grid import Grid
from megatron.positions import FILES, REGISTRY
from megatron.training.loop import train
from tests.training.conftest import tiny

OWN = """
from megatron.positions import DistanceBias, register

@register("slanted")
class Slanted(DistanceBias):
    def log_kernel(self, distance):
        return (-distance.float() / 4).expand(self.shape.heads, -1)
"""
KINDS = {
    "fp32": ["pos_emb=slanted", "pos_emb_file={folder}/slanted.py"],
    "bf16": ["precision=bf16"],
    "zero1": ["zero_optimization.stage=1"],
    "zero2": ["zero_optimization.stage=2"],
    "zero3": ["zero_optimization.stage=3"],
}
SMALL = ["num_layers=1", "hidden_size=16", "num_attention_heads=2", "seq_length=16"]


@dataclass(frozen=True)
class Outcome:
    """Answer of a use of a checkpoint with a damaged file; message: None if it noticed nothing.

    named: whether the message names the file
    """

    use: str
    file: str
    damage: str
    message: str | None
    named: bool


@contextmanager
def own_encoding(folder: Path) -> Iterator[None]:
    """The file of an encoding of the user's own in a folder; forgotten after the block."""
    (folder / "slanted.py").write_text(OWN)
    try:
        yield
    finally:
        REGISTRY.pop("slanted", None)
        FILES.clear()


def words(corpus: Path, folder: Path, kind: str, *more: str) -> list[str]:
    """Settings of a run in {folder}/run with checkpoints of steps 1 and 2."""
    kind_words = [word.format(folder=folder) for word in KINDS[kind]]
    paths = [f"data_path={corpus}", f"save={folder}/run", f"load={folder}/run"]
    return tiny(*SMALL, *paths, "train_iters=2", "save_interval=1", *kind_words, *more)


def settings(corpus: Path, folder: Path, kind: str, *more: str) -> Config:
    """The configuration of `words`."""
    return load([], words(corpus, folder, kind, *more))


def found_by_use(corpus: Path, folder: Path, kind: str, grid: Grid, *more: str) -> list[Outcome]:
    """Damage each file of the checkpoint of step 2 of a run in every way, resume and evaluate it.

    more: settings of the resumed run
    """
    run = folder / "run"
    config = settings(corpus, folder, kind, "train_iters=3", "lr_decay_iters=3", *more)
    uses = {
        "resume": lambda: train(config, grid),
        "evaluation": lambda: load_for_evaluation(run),
    }
    load_for_evaluation(run)  # undamaged it can be used
    outcomes = []
    for file in sorted((run / "global_step2").iterdir()):
        content = file.read_bytes()
        counterpart = run / "global_step1" / file.name
        for damage, damaged in damages(content, counterpart).items():
            with changed(file, damaged):
                for use, act in uses.items():
                    if use == "evaluation" and file.name not in {RECORD, *READ_BY_EVALUATION}:
                        continue
                    message, named = None, False
                    try:
                        act()
                    except UserError as fault:
                        message = str(fault)
                        named = f"{file.parent.name}/{file.name}" in message
                    outcomes.append(Outcome(use, file.name, damage, message, named))
    return outcomes


def damages(content: bytes, counterpart: Path) -> dict[str, bytes | None]:
    """Contents of a file after a fault, None for no file; counterpart: that of another step."""
    draw = random.Random(len(content))
    flipped = bytearray(content)
    if content:
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    contents = {
        "truncated": content[: len(content) // 2],
        "flipped": bytes(flipped),
        "emptied": b"",
        "deleted": None,
        "replaced": counterpart.read_bytes() if counterpart.exists() else content,
    }
    return {name: damaged for name, damaged in contents.items() if damaged != content}


@contextmanager
def changed(file: Path, content: bytes | None) -> Iterator[None]:
    """Another content of a file inside the block, None for no file; afterwards the old one."""
    before = file.read_bytes()
    file.unlink()
    if content is not None:
        file.write_bytes(content)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)
        file.write_bytes(before)
